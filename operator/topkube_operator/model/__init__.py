"""The data that the rooms of the operator share: observed objects, the status, names, and the plan. Pure."""
