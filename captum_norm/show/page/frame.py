"""Shows a page inside of a notebook."""

import html

from captum_norm.show.page.document import Page
from captum_norm.show.page.html import render
from captum_norm.text.characters import spelled_out

HEIGHT = 640
"""The height of the frame in pixels."""


def framed(page: Page) -> str:
    """Put a page into a frame with a content policy of its own, which can run its script and reach nothing else.

    Example:
        >>> framed(Page("Norms"))[:40]
        '<iframe title="Norms" sandbox="allow-scr'
    """
    return (
        f'<iframe title="{html.escape(spelled_out(page.title))}" sandbox="allow-scripts" loading="lazy" '
        f'style="width:100%;height:{HEIGHT}px;border:0" srcdoc="{html.escape(render(page))}"></iframe>'
    )
