"""Text that a model, or a stranger, may write: markup, escapes, characters that turn the line."""

HOSTILE = [
    "<script>window.__x=1</script>",
    '<img src=x onerror="window.__x=1">',
    "</span></p><script>1</script>",
    '"><svg/onload=window.__x=1>',
    "' onmouseover='window.__x=1",
    "<!--<script>",
    "]]><style>*{background:url(//127.0.0.1:9/x)}</style>",
    "&lt;b&gt;",
    "\x1b]8;;http://127.0.0.1:9\x07link\x1b]8;;\x07",
    "\u202e\u2066gpj.exe\u2069",
    "a\u2028b\r\tc",
    "{{7*7}}\n\n",
]
