"""The README test finds what it is there to check."""

from __future__ import annotations

from tests.docs.test_readme import (
    blocks_of,
    modules_run_in,
    placeholders_of,
    plans_in,
    relative_links_of,
    zorse_commands_of,
    zorse_names_of,
)

TEXT = """# Title

See [the plan](launch/plan.json#top), ![a picture](docs/a.png "title"), [home](https://example.org)
and [below](#title), but not `[code](nowhere)`.

```bash
pip install zorse_ds
$ zorse plan --cluster c.json \\
    --out plan.json
zorse report | head -3
```

Write `plan.json`:

```json
{"zorse": {"plan": {"version": 1, "groups": [], "stages": []}}}
```

```bash no-test
zorse profile
```

```python
from zorse_ds import Plan
zorse_ds.from_pretrained("[x](y)")
```
"""


def test_blocks_have_language_line_and_file_name() -> None:
    shown = [(b.language, b.line, b.file_name) for b in blocks_of(TEXT)]
    assert shown == [("bash", 6, ""), ("json", 15, "plan.json"), ("python", 23, "")]


def test_commands_are_joined_and_others_left_out() -> None:
    commands = [" ".join(c.split()) for c in zorse_commands_of(blocks_of(TEXT))]
    assert commands == ["zorse plan --cluster c.json --out plan.json", "zorse report | head -3"]


def test_plans_are_found_inside_a_configuration() -> None:
    plan = {"version": 1, "groups": [], "stages": []}
    assert plans_in({"zorse": {"plan": plan}, "steps": [1]}) == [plan]


def test_links_are_relative_and_outside_code() -> None:
    assert relative_links_of(TEXT) == ["docs/a.png", "launch/plan.json"]


def test_names_of_the_package_are_found() -> None:
    python = next(b for b in blocks_of(TEXT) if b.language == "python")
    assert zorse_names_of(python.body) == {"Plan", "from_pretrained"}


def test_placeholders_and_modules_are_found() -> None:
    text = "it takes @@TIME@@ s (`python -m benchmarks.overhead`),\nlike python -m pip install."
    assert placeholders_of(text) == ["it takes @@TIME@@ s (`python -m benchmarks.overhead`),"]
    assert modules_run_in(text) == {"benchmarks.overhead"}
