"""Lazy: the names of the package's face, imported when somebody asks for them (PEP 562); a face holds no function."""

from importlib import import_module

NAMES = {"load_job": "greylag.spec.load", "predict": "greylag.notebook", "SpecError": "greylag.spec.error"}
"""Where each of them lives."""


def __getattr__(name: str) -> object:
    if name not in NAMES:
        raise AttributeError(f"module 'greylag' has no attribute {name!r}; it has {', '.join(NAMES)}")
    return getattr(import_module(NAMES[name]), name)
