"""Limits of scores and of code tasks. This file imports nothing, because every reward process imports it when it starts."""

SANDBOX = "reward_model.sandbox_fusion"
URL = f"{SANDBOX}.url"

LARGEST_SCORE = 1e12
"""Largest absolute value of a score.

An advantage is at most twice as large, 2e12. fp32 holds numbers up to 3.4e38. So these are still finite in fp32: the sum of the
squared advantages of 8e13 tokens, and the squared norm of a gradient that has a norm of up to 9e6 at an advantage of 1.
"""

CASES = 10
"""Largest number of test cases of a task that are run, as in verl."""

CASE_SECONDS = 10
"""Time limit in seconds of a program on one test case, as in verl. The service then stops the program."""
