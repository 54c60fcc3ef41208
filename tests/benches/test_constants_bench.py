"""benches/constants.py makes a constant one that can be set, and says what that changed."""

from __future__ import annotations

import constants


def test_a_constant_of_the_planner_can_be_set() -> None:
    file, names = "tolerance.rs", constants.CONSTANTS["tolerance.rs"]
    text = (constants.ROOT / constants.CORE / file).read_text()
    made = constants.adjustable(text, file, names)
    for name in names:
        assert constants.value_of(file, name) > 0
        assert f"fn {name}()" in made
        assert f"const {name}:" not in made


def test_uses_become_calls_and_documentation_stays() -> None:
    text = (
        "/// At most [`MOST`].\nconst MOST: usize = 1 << 4;\n\nfn f() -> usize { MOST + ALMOST }\n"
    )
    made = constants.adjustable(text, "f.rs", ["MOST"])
    assert "/// At most [`MOST`].\n" in made
    assert "fn f() -> usize { MOST() + ALMOST }" in made
    assert 'crate::constant("f.rs:MOST", (1 << 4) as f64) as usize' in made


def test_a_setting_is_told_by_what_it_changed() -> None:
    base = {"found": {"a": [100, 100], "b": [200, 150]}, "plan_s": 2.0, "pack_s": 1.0}
    other = {"found": {"a": [110, 100], "b": [200, 150]}, "plan_s": 1.0, "pack_s": 1.0}
    row = {"constant": "f.rs:MOST", "factor": 0.25, "value": 4, **constants.compared(base, other)}
    assert constants.line(row) == (
        "f.rs:MOST x 0.25 = 4: 1 larger (at most +10.00%), 0 smaller (at most +0.00%), "
        "0 other bounds, -1 proved, CPU time x 0.50 (packings 1.00)"
    )
