"""Properties are searched without a clock: a busy machine must not make a law fail."""

from hypothesis import settings

settings.register_profile("no-clock", deadline=None)
settings.load_profile("no-clock")
