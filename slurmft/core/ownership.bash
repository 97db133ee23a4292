# What core/ownership.py asks, for scripts of bash.
#
# Each statement ends with a semicolon: lines are joined where a script has to be one line.

# Fails where another user has mounted a path's file system: it shows whichever owner they like.
slurmft_mount_is_trusted() { # PATH
  local by_us;
  local device;
  local minor;
  if [ "$(stat -fc %t "$1")" != 65735546 ]; then return; fi; # no file system in user space
  device=$(stat -Lc %d "$1") || return;
  if ((device >> 8 & 4095)); then return; fi; # users cannot mount a disk
  minor=$((device & 255 | device >> 20 << 8));
  # Fields of proc(5): device, ..., type, source, and the options, which the kernel writes.
  by_us="fuse(\.[^ ]*)? [^ ]* [^ ]*,user_id=(0|$EUID)(,|$)";
  # A virtual machine's folders of its host have the number of FUSE, too.
  LC_ALL=C grep -Eq "^[0-9]+ [0-9]+ 0:$minor .* - (virtiofs |$by_us)" /proc/self/mountinfo;
};

# Fails where a folder is neither this user's nor root's, or has another inode: of others, one may
# have the same inode on another disk.
slurmft_is_same() { # PATH INODE
  [[ -O $1 || $(stat -Lc %u "$1") = 0 ]] || return;
  slurmft_mount_is_trusted "$1" || return;
  [ "$(stat -Lc %i "$1")" = "$2" ];
};
