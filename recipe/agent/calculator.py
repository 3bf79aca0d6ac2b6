"""A calculator as an environment: its public method is the tool that the model may call."""

from typing import Any


class Calculator:
    def reset(self, **row: object) -> None:
        """Begin a conversation. ``row`` has the columns of the dataset."""
        self.calls = 0

    def multiply(self, a: int, b: int) -> str:
        """Multiply two numbers.

        Args:
            a: The first number.
            b: The second number.

        Returns:
            The product.
        """
        self.calls += 1
        return str(a * b)


def is_right(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """Return 1 if the model's last message is the product, else 0."""
    last = extra_info["messages"][-1]
    return float(last["role"] == "assistant" and last["content"] == ground_truth)
