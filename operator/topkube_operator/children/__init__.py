"""Build the objects of a job: pods, credentials, the Service, policies, volumes, and their placement. Pure."""
