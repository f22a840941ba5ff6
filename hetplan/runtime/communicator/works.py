"""What is a transfer under way?"""

from __future__ import annotations

from typing import Protocol


class Work(Protocol):
    """A transfer under way."""

    def wait(self) -> object:
        """Until it is done (on an accelerator: until the stream's next work may rely on it)."""
        ...
