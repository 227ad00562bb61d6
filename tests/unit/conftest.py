"""Stand-ins for parts that are not there yet; they give way to the real ones by themselves."""

from tests.unit import dynamo_support  # noqa: F401
