"""`topkube doctor`: check what training needs. A line that is not ok has a next step.

`command` runs the checks and prints the report; `check` defines a line of it. Each other module has the checks of one
subject. `gpu_probe` is a program of its own: `python -m topkube.cli.doctor.gpu_probe`.
"""
