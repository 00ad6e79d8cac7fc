"""TopKube from Python and from notebooks: train a function on a cluster, or on this machine, with the same calls.

`client` has the TrainingClient, `function` writes the script of a function, and the backends carry jobs out: `cluster`
with the functions of the command line, `local` with `topkube run`. `display` shows progress and plots.
"""

from topkube.sdk.client import TrainingClient

__all__ = ["TrainingClient"]
