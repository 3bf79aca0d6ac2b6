"""A whole GRPO step of a real language model with TRL's GRPOTrainer and with verl_memopt: seconds by phase, in turns."""
