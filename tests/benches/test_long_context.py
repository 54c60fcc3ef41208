"""benches/long_context.py: a block of a Llama trains within what only tiles can keep."""

from __future__ import annotations

import sys

import pytest

pytest.importorskip("transformers")

import long_context

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS, HEADS = 256, 8


def test_a_block_trains_within_a_third_of_what_whole_operators_take(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(long_context, "WIDTH", 32)
    monkeypatch.setattr(long_context, "HIDDEN", 96)
    monkeypatch.setattr(long_context, "run", long_context.trained)
    arguments = ["--tokens", TOKENS, "--heads", HEADS]
    monkeypatch.setattr(sys, "argv", ["long_context.py", *map(str, arguments)])
    assert long_context.main() == 0
    told = capsys.readouterr().out
    assert "never exist whole" in told
    assert "losses and parameters equal" in told
