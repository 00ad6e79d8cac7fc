"""Print TopKube's dependencies and those of the named extras, one per line. They are a separate layer of the images.

python requirements.py EXTRA...    reads the pyproject.toml in its own folder
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
