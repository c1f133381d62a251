"""verl's tests need an environment of their own (`make test-verl`); elsewhere they are skipped."""

from tests.verl.environment import apply

apply()
