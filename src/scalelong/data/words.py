"""The text encoder `words`: a fixed random vector per word. It needs no weights, no download and no transformers.

A network that projects its text tokens, as all of ours do, learns from such vectors what it would learn from a table of
word embeddings. Captions with a small vocabulary need no more; words that training never saw have no meaning.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256

import numpy as np
import torch
from torch import Tensor

from scalelong.errors import invalid

WORD, POSITION = 48, 16  # widths: what the word is, and where it stands
WORDS = re.compile(r"\w+|[^\w\s]")


class WordEncoder:
    """Prompts to tokens (B, T, 64): [vector of the word, sinusoids of its position], zero after the last word."""

    name = "words"
    width = WORD + POSITION
    fingerprint = sha256(b"words 1").hexdigest()

    def __init__(self, max_length: int | None = None) -> None:
        self.max_length = 16 if max_length is None else max_length
        if not 1 <= self.max_length <= 512:
            raise invalid("max_length", "from 1 to 512 for text encoder words", max_length)

    def encode(self, prompts: Sequence[str]) -> Tensor:
        """Return the tokens as float32 (B, T, D), rounded to the cache's float16."""
        tokens = torch.zeros(len(prompts), self.max_length, self.width)
        for row, prompt in enumerate(prompts):
            for place, word in enumerate(_split(prompt)[: self.max_length]):
                tokens[row, place, :WORD] = _vector(word)
                tokens[row, place, WORD:] = _sinusoids(place)
        return tokens.half().float()

    def truncated(self, prompts: Sequence[str]) -> int:
        """Return how many prompts are longer than `max_length` words."""
        return sum(len(_split(prompt)) > self.max_length for prompt in prompts)


def _split(prompt: str) -> list[str]:
    return WORDS.findall(prompt.casefold())


@lru_cache(maxsize=1 << 16)
def _vector(word: str) -> Tensor:
    """N(0, 1) from a hash of the word: the same on every machine."""
    seed = int.from_bytes(sha256(word.encode()).digest()[:8], "big")
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(WORD)).float()


def _sinusoids(place: int) -> Tensor:
    angles = place * 100.0 ** -(torch.arange(POSITION // 2) / (POSITION // 2))
    return torch.cat([angles.sin(), angles.cos()])
