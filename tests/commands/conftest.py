"""The commands that talk to a server are given the frontend with a fake engine."""

from radixserve.tests.server.conftest import folder, service

__all__ = ["folder", "service"]
