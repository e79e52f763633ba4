"""Writes what follows from the structs of the model: the table of columns in docs/guide.md, and the JSON schemas.

python tools/make_tables.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from tensorprobe.model.comparison import COLUMNS, Comparison
from tensorprobe.model.precheck import Audit, Precheck
from tensorprobe.standard_json import schema

ROOT = Path(__file__).resolve().parents[1]
GUIDE = ROOT / "docs" / "guide.md"
TABLE = re.compile(r"(?<=\n### The columns\n\n\| column \| meaning \|\n\|---\|---\|\n)(\|[^\n]*\n)+")


def main() -> None:
    """Write the files anew."""
    rows = "".join(f"| `{name}` | {meaning} |\n" for name, meaning in COLUMNS.items())
    GUIDE.write_text(TABLE.sub(lambda _: rows, GUIDE.read_text(encoding="utf-8")), encoding="utf-8")
    for name, kind in (("comparison", Comparison), ("precheck", Precheck), ("audit", Audit)):
        text = json.dumps(schema(kind, title=f"tensorprobe {name}"), indent=2) + "\n"
        (ROOT / "src" / "tensorprobe" / "report" / f"{name}.schema.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
