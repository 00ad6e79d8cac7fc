"""Print TopKube's dependencies, one a line, with those of the extras that are named: a layer of its own in the images.

python requirements.py EXTRA...    reads the pyproject.toml beside it
"""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path(__file__).with_name("pyproject.toml").read_text())["project"]
print(
    *project["dependencies"],
    *(line for extra in sys.argv[1:] for line in project["optional-dependencies"][extra]),
    sep="\n",
)
