"""The hook of MkDocs that adds the pages made from code; mkdocs.yml names it."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from api import api_pages
from arguments import attacks_page, objectives_page, options_page
from commands import commands_page
from config_keys import configuration_page
from mkdocs.structure.files import File
from notebook_page import notebook_page


def on_files(files, config):
    """Adds the generated pages to the files that MkDocs has found."""
    pages = {
        "notebook.md": notebook_page(),
        "reference/attack_arguments.md": attacks_page(),
        "reference/objective_arguments.md": objectives_page(),
        "reference/options.md": options_page(),
        "reference/commands.md": commands_page(),
        "reference/configuration.md": configuration_page(),
        **api_pages(),
    }
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files
