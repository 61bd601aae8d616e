"""Floor 6: the command line, and everything that prints or draws."""

from .job import Job as Job
