import pytest
from playwright.sync_api import sync_playwright

from tests.requirements import program


@pytest.fixture(scope="module")
def browser():
    chromium = program("chromium")
    arguments = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
    quiet = ["--disable-background-networking", "--disable-component-update"]
    with sync_playwright() as player:
        started = player.chromium.launch(executable_path=chromium, args=[*arguments, *quiet])
        yield started
        started.close()
