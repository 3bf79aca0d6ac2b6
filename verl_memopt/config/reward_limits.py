"""Limits of scores and of code tasks. Imports nothing, because every reward process reads it when it starts."""

SANDBOX = "reward_model.sandbox_fusion"
URL = f"{SANDBOX}.url"

LARGEST_SCORE = 1e12
"""Largest size of a score. Advantages are at most twice as large, so in fp32 (up to 3.4e38) the sum of their squares is finite
for 8e13 tokens, and so is the squared norm of a gradient of up to 9e6 for an advantage of 1."""

CASES = 10
"""Most test cases of a task that count, as in verl."""

CASE_SECONDS = 10
"""Longest time of a program on one test case, as in verl. The service stops it then."""
