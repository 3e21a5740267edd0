"""The text of the demonstration and what is asked about it."""

from __future__ import annotations

from importlib import resources
from typing import Final

QUESTIONS: Final = (
    "What is the name of the relief boat?",
    "When was the lamp first lit?",
    "Who is the doctor at Port Selwyn?",
)
"""Questions that a base model of this size answers from the document."""
QUESTION: Final = QUESTIONS[0]


def demo_document() -> str:
    """The document: about 3,070 tokens of the demo model's tokenizer."""
    return resources.files("kakeya_zmq.demo").joinpath("document.txt").read_text("utf-8").rstrip("\n")


def demo_prompt(question: str = QUESTION) -> str:
    """The document with a question after it, as a text that a base model continues with the answer."""
    return f"{demo_document()}\n\nQuestion: {question}\nAnswer:"
