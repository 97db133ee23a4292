# Enters the folder into which --on sends code; see core/ownership.bash, whose functions come first.
#
# All but the last function ask of the present folder: what has its name by now does not count.

# Succeeds where others can give the folder's name to another folder of this user's, which they may
# have filled: who can write a folder above, or has made it.
slurmft_can_be_renamed() {
  local above;
  local mode;
  local owner;
  above=$(pwd -P);
  until [ "$above" = / ]; do
    above=$(dirname -- "$above");
    read -r mode owner < <(stat -c '%a %u' -- "$above");
    if ((8#$mode & 8#22)) && ((!(8#$mode & 8#1000))); then return; fi;
    if ((owner)) && ((owner != EUID)); then return; fi;
  done;
  return 1;
};

slurmft_is_closed() {
  ((!(8#$(stat -c %a .) & 8#77)));
};

slurmft_is_marked() { # MARK
  [ "$(stat -c %i .)" = "$(cat "$1" 2>/dev/null)" ];
};

# Succeeds where there is nothing but what file servers show in each folder.
slurmft_is_empty() {
  [ -z "$(ls -A -I .snapshot -I .snapshots -I .zfs)" ];
};

slurmft_is_own() { # MARK IS_NEW
  [ -O . ] || return;
  slurmft_mount_is_trusted . || return;
  # What lies in a closed folder nobody else can write, whatever lists it takes over.
  if [ "$2" ]; then
    slurmft_is_closed && slurmft_is_empty;
  elif slurmft_can_be_renamed; then
    slurmft_is_closed && slurmft_is_marked "$1";
  else
    chmod go-rwx .;
  fi;
};

# Enters a folder, and makes it where it is absent; fails where slurmft may not have made it for
# this user alone.
slurmft_enter() { # FOLDER MARK
  local is_new=;
  mkdir -p -- "$(dirname -- "$1")" || return;
  if mkdir -m 700 -- "$1" 2>/dev/null; then is_new=1; fi;
  if [ -L "$1" ]; then return 1; fi;
  CDPATH='' cd -P -- "$1" 2>/dev/null || return;
  slurmft_is_own "$2" "$is_new" || return;
  if [ "$is_new" ] && slurmft_can_be_renamed; then
    stat -c %i . >"$2";
  fi;
};
