"""The operator: a TrainingJob in, pods out. The reconciler arrives with the operator release; see ARCHITECTURE.md."""
