"""Models behind HTTP: OpenAI's interface, a page to chat on, and figures for a monitor.

Everything here but `errors`, `limits` and `metrics` needs the extra `serve`.
"""
