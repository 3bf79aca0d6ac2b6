"""The same toy task with TRL's RLOOTrainer and with verl_memopt: seconds and peak tensor bytes in one table."""
