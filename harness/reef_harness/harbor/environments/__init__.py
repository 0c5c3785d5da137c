"""Environments of Harbor that need no container engine: a folder of this host, or a bubblewrap root over it.

| | HostDirEnvironment | BwrapEnvironment |
|---|---|---|
| needs | Linux | Linux, root, bubblewrap, util-linux |
| paths | those of the task are rewritten in commands and scripts | real |
| files of the host | all that the user may touch | /usr, /lib, /bin and a little of /etc, read-only |
| processes | the user's | a namespace of their own |
| network | the host's | the host's, or none where the task says so |
| image, Dockerfile, limits of CPU and memory | ignored | ignored |

So commands that a model writes belong in the second, or in a container: the first is no sandbox, but for agents that
run nothing of the model's, as HarborAgent. The second keeps a model's mistakes from the host, not an attacker: the
kernel and, unless the task forbids it, the network are the host's. Neither installs what a Dockerfile would.
"""

from reef_harness.harbor.environments.bwrap import BwrapEnvironment
from reef_harness.harbor.environments.host_dir import HostDirEnvironment

__all__ = ["BwrapEnvironment", "HostDirEnvironment"]
