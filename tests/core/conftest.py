"""Property tests here are judged by what they find, not by how fast a shared machine runs them."""

from hypothesis import settings

settings.register_profile("house", deadline=None)
settings.load_profile("house")
