"""Other people's formats: what users have, as jobs.

from pathlib import Path
from greylag.interop import import_file

imported = import_file(Path("train_llama3.sh"), cluster="h100-8x16")
print(imported.text, *imported.remarks, sep="\n")

A launch script or YAML of Megatron, a configuration of torchtitan, a config.json of Hugging Face. Nothing of them is
run, and what a job cannot hold is said.
"""

from greylag.interop.file import import_file
from greylag.interop.jobfile import Imported

__all__ = ["Imported", "import_file"]
