"""What must survive a kill, a power cut or a full disk: files and folders that appear whole, and locks."""

from polysketch.storage.folders import require_free, whole_folder
from polysketch.storage.lock import FolderLock

__all__ = ["FolderLock", "require_free", "whole_folder"]
