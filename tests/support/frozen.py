"""What the server does when it has imported all else. See `fork_server.py`."""

import atexit
import gc

import setproctitle

# Finds the place of the title, for which it looks at the environment that the process began with.
setproctitle.getproctitle()
# Keeps what was imported out of garbage collections.
gc.collect()
gc.freeze()
# Or libraries that check for it at exit report leaks.
atexit.register(gc.unfreeze)
