"""The inner optimizers on flat vectors; `choice.make_optimizer` gives the job's."""
