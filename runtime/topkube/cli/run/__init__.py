"""`topkube run`: all ranks of a TrainingJob on this machine, watched, summed up, and none left behind.

`command` starts the run, `watch` follows it to its end, `report` shows the results; `options` are those of the command
line, `summary` defines summary.json.
"""
