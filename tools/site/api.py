"""Pages of the public names, which mkdocstrings fills from their docstrings."""

import importlib.util
import inspect
import types

MODULES = {
    "he_keras": "index",
    "he_keras.attacks": "attacks",
    "he_keras.objectives": "objectives",
    "he_keras.layers": "layers",
    "he_keras.networks": "networks",
    "he_keras.data": "data",
    "he_keras.evaluation": "evaluation",
    "he_keras.export": "export",
    "he_keras.serving": "serving",
    "he_keras.schedules": "schedules",
    "he_keras.callbacks": "callbacks",
    "he_keras.analysis": "analysis",
    "he_keras.search": "search",
    "he_keras.experiment": "experiment",
    "he_keras.distribution": "distribution",
    "he_keras.zoo": "zoo",
}


def api_pages() -> dict[str, str]:
    """The page of each public module, by the path of its file."""
    return {f"reference/api/{page}.md": _page(name) for name, page in MODULES.items()}


def _page(module_name: str) -> str:
    module = importlib.import_module(module_name)
    lines = [f"# {module_name}", "", _first_paragraph(module), ""]
    if module_name == "he_keras":
        lines += _list_of_modules()
    for name in sorted(module.__all__, key=str.lower):
        thing = getattr(module, name)
        is_documented = inspect.isclass(thing) or isinstance(thing, types.FunctionType)
        if is_documented and thing.__module__.startswith("he_keras"):
            lines += [f"::: {_place(module, name)}.{name}", ""]
    return "\n".join(lines)


def _place(module, name: str) -> str:
    """The module in which a reader of the source finds the name."""
    # It does not find what is imported only when it is asked for, and a module of the same name
    # hides the function.
    has_module = importlib.util.find_spec(f"{module.__name__}.{name}") is not None
    is_hidden = has_module or name not in vars(module)
    return getattr(module, name).__module__ if is_hidden else module.__name__


def _list_of_modules() -> list[str]:
    rows = ["| module | what it holds |", "|---|---|"]
    for name, page in MODULES.items():
        if page != "index":
            text = _first_paragraph(importlib.import_module(name)).replace("|", "\\|")
            rows.append(f"| [`{name}`]({page}.md) | {text} |")
    return [*rows, ""]


def _first_paragraph(module) -> str:
    return " ".join((inspect.getdoc(module) or "").partition("\n\n")[0].split())
