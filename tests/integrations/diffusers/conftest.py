"""What is imported here may need a torchvision that loads."""

import integrations.torchvision_here  # noqa: F401
