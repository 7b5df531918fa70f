"""The API: runs, their verbs and what became of them over HTTP, for people and programs. On a listener of its own.

``routes`` declares what there is, once: from it come the dispatch, the checks and the OpenAPI document. ``guard`` keeps
out who has no key, and every web page. Handlers call the functions that the command line calls.
"""
