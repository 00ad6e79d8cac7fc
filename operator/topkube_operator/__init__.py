"""The operator: it turns TrainingJobs into pods. See ARCHITECTURE.md."""
