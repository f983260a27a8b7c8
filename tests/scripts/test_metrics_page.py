"""docs/metrics.md is what the registry says now."""

from __future__ import annotations

import runpy
from pathlib import Path

from fedsim.evaluation import registry

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "metrics_page.py"))


def test_the_page_is_up_to_date_and_has_every_metric() -> None:
    page = SCRIPT["PAGE"].read_text(encoding="utf-8")
    assert page == SCRIPT["page"](), "out of date: python scripts/metrics_page.py writes it again"
    prefixes = tuple(f"{model}_" for model in registry.MODEL_LABELS)
    own = {name for name in registry.METRICS if not name.startswith(prefixes) or name == "client_accuracy_worst10"}
    assert all(f"\n| `{name}` | " in page for name in own)
