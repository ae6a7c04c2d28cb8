"""Pages as text, and in a browser."""

import re
from contextlib import contextmanager


def body(page):
    """The page without its scripts and styles."""
    return re.sub(r"<(script|style)>.*?</\1>", "", page, flags=re.DOTALL)


@contextmanager
def drawn(browser, path, html, scheme, width):
    """The page in the browser, once its charts are drawn. It fits, logs nothing, and no request may have left it in the end."""
    path.write_text(html, "utf-8")
    page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 800})
    problems, requests = [], []
    page.on("console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(path.as_uri())
    page.wait_for_selector("body[data-drawn=true]", timeout=30_000)
    yield page
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert [url for url in requests if not url.startswith(("file:", "data:", "blob:"))] == []
    assert problems == []
    page.close()


def chart_names(page):
    """The charts that are drawn, each of which has a size."""
    charts = page.locator(".chart svg.main-svg").evaluate_all(
        "all => all.map(one => [one.closest('.chart').id, one.clientWidth, one.clientHeight])"
    )
    assert all(wide > 300 and high > 150 for _, wide, high in charts)
    return {name.removeprefix("chart-") for name, _, _ in charts}
