"""Small files for every form of own data, and the settings that read them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from PIL import Image

SETTINGS = {
    "dataset=table": ["dataset.path=people.csv", "dataset.target=ill", "dataset.client=who"],
    "dataset=text_table": [
        "dataset.path=people.csv",
        "dataset.text='{age} of {dose}'",
        "dataset.target=ill",
        "model=text_classifier",
        "model.width=8",
    ],
    "model=text_classifier": [
        "dataset=text_table",
        "dataset.path=people.csv",
        "dataset.text=who",
        "dataset.target=ill",
        "model.width=8",
    ],
    "dataset=arrays": ["dataset.path=own.npz"],
    "dataset=image_folder": ["dataset.path=pets"],
    "dataset=leaf": ["dataset.path=leaf.json"],
    "dataset=torch": [
        "dataset.train._target_=torchvision.datasets.FakeData",
        "+dataset.train.size=60",
        "+dataset.train.image_size=[3,8,8]",
    ],
    "availability=log": ["availability.path=log.csv", "availability.round=5"],
    "availability=table": ["availability.path=rounds.csv"],
    "availability=trace": ["availability.path=columns.csv"],
    "drift=replay": ["drift.path=drift.csv"],
    "dataset=hub": ["dataset.path=csv", "dataset.data_files=people.csv", "dataset.x=[age,dose]", "dataset.y=ill"],
}


def write(folder: Path) -> None:
    """All of them."""
    rows = [f"{row % 7},{row % 3}.5,{'abc'[row % 3]},{row % 2}" for row in range(60)]
    (folder / "people.csv").write_text("\n".join(["age,dose,who,ill", *rows]))
    clients = range(12)
    (folder / "log.csv").write_text("\n".join(["client,from,to", *(f"{k},{k},{k + 9}" for k in clients)]))
    (folder / "rounds.csv").write_text("\n".join(["client,round,available", *(f"{k},{k % 3},0.5" for k in clients)]))
    (folder / "columns.csv").write_text("\n".join([",".join(map(str, clients)), "1,0" + 10 * ",1", "0,1" + 10 * ",0"]))
    (folder / "drift.csv").write_text("round,displacement\n0,0\n2,3\n")
    x, y = np.random.default_rng(0).random((60, 4), dtype=np.float32), np.arange(60) % 3
    np.savez(folder / "own.npz", x=x, y=y)
    users = {f"u{n}": {"x": x[n::3].tolist(), "y": y[::3].tolist()} for n in range(3)}
    content = {"users": [*users], "num_samples": [20] * 3, "user_data": users}
    content["user_data"]["u1"]["y"] = y[:20].tolist()
    (folder / "leaf.json").write_text(json.dumps(content))
    for number in range(40):
        path = folder / "pets" / ("cat", "dog")[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((4, 4), number, np.uint8)).save(path)
