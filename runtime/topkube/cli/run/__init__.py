"""`topkube run`: start all ranks of a TrainingJob on this machine, follow them, and report the results.

`command` starts the run, `watch` follows it to its end, `report` shows the results; `options` are those of the command
line, `summary` defines summary.json.
"""
