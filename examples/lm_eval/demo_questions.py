"""Which of the held-out questions have a number as their answer."""

from typing import Any


def only_arithmetic(questions: Any) -> Any:
    """Without those whose answer would have to be made to begin with `{` by the asker."""
    return questions.filter(
        lambda each: each["family"] == "arithmetic" and each["form"] != "json_forced"
    )
