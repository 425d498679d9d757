"""Page: what all pages have in common: templates of this folder, in which every value is escaped and must be there."""

from pathlib import Path

import jinja2

from greylag.spec import quantity


def template(name: str) -> jinja2.Template:
    """A template by its file's name, with quantities as filters."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for filter_name in ("seconds", "memory", "count", "percent", "difference"):
        environment.filters[filter_name] = getattr(quantity, filter_name)
    return environment.get_template(name)
