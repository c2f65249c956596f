"""The notebook as a page: its text, its code, and what the stored run printed."""

import json
import pathlib

_FILE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "first_look.ipynb"


def notebook_page() -> str:
    """Returns the Markdown of the notebook, pictures inside."""
    cells = json.loads(_FILE.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join(part for cell in cells for part in _parts(cell))


def _parts(cell: dict) -> list[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return [source]
    return [f"```python\n{source}\n```", *filter(None, map(_output, cell["outputs"]))]


def _output(output: dict) -> str:
    """An output: a picture where there is one, else the text."""
    if output["output_type"] == "stream":
        return f"```text\n{''.join(output['text']).rstrip()}\n```"
    data = output.get("data", {})
    if "image/png" in data:
        encoded = "".join(data["image/png"]).replace("\n", "")
        return f'<img alt="drawn by the cell above" src="data:image/png;base64,{encoded}">'
    text = "".join(data.get("text/plain", ""))
    return f"```text\n{text}\n```" if text else ""
