"""One self-contained HTML page of a report: figures, comparisons, filters, and the questions behind the scores.

Owns `kvbench report --html FILE`. The page needs no network and no server, and shows text of any origin as text.
"""

from kvbench.report.page.document import html, write

__all__ = ["html", "write"]
