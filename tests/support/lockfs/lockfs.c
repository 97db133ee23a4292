/*
 * A file system for tests: a folder, seen as the clients of GPFS or Lustre see one.
 *
 *     lockfs BACK MOUNT [--leak-ofd]
 *
 * shows the folder BACK at MOUNT, in the foreground, and prints "ready" when it is mounted. Two mounts
 * of one folder behave as two nodes of a cluster:
 *
 *   - byte-range locks (fcntl, lockf, and those of open file descriptions) exclude across the mounts:
 *     they are forwarded to BACK;
 *   - flock() excludes within a mount only: this file system does not implement it, so the kernel keeps
 *     it local.
 *
 * With --leak-ofd the locks of open file descriptions outlive them unless they are unlocked, as on file
 * systems that forget to release them; the mount has to end to free them.
 *
 * Nothing is cached between requests: names and attributes are looked up in BACK every time.
 */
#define FUSE_USE_VERSION 31
#define _GNU_SOURCE

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fuse_lowlevel.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

enum { LOCK_POLL_US = 5000 };

/* A file or folder that the kernel knows; found by device and number, so that hard links are one. */
struct node {
    dev_t dev;
    ino_t ino;
    int fd; /* O_PATH: stays valid when the name goes away */
    uint64_t lookups;
    struct node *next;
};

/*
 * The byte-range locks of one owner on one file. An owner is a process or an open file description;
 * here each gets an open file description of its own on BACK, which carries the real locks.
 */
struct claim {
    struct node *node;
    uint64_t owner;
    uint64_t handle; /* through which the first lock came */
    int fd;
    struct claim *next;
};

static struct node root;
static struct node *nodes;
static struct claim *claims;
static pthread_mutex_t tables = PTHREAD_MUTEX_INITIALIZER;
static bool leak_ofd;

static struct node *node_of(fuse_ino_t id) {
    return id == FUSE_ROOT_ID ? &root : (struct node *)(uintptr_t)id;
}

static int fd_of(fuse_ino_t id) {
    return node_of(id)->fd;
}

/* The path by which a node's O_PATH descriptor can be opened, changed or linked. */
struct proc_path {
    char text[40];
};

static struct proc_path path_of(fuse_ino_t id) {
    struct proc_path path;
    snprintf(path.text, sizeof path.text, "/proc/self/fd/%d", fd_of(id));
    return path;
}

static void reply_status(fuse_req_t req, int result) {
    fuse_reply_err(req, result == -1 ? errno : 0);
}

/* ---- nodes ---- */

/* The entry for a name, counted as one more lookup; 0 or an errno. */
static int look_up(fuse_ino_t parent, const char *name, struct fuse_entry_param *entry) {
    memset(entry, 0, sizeof *entry);
    int fd = openat(fd_of(parent), name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
    if (fd == -1)
        return errno;
    if (fstat(fd, &entry->attr) == -1) {
        int error = errno;
        close(fd);
        return error;
    }
    pthread_mutex_lock(&tables);
    struct node *node = nodes;
    while (node && (node->ino != entry->attr.st_ino || node->dev != entry->attr.st_dev))
        node = node->next;
    if (node) {
        close(fd);
    } else {
        node = calloc(1, sizeof *node);
        *node = (struct node){entry->attr.st_dev, entry->attr.st_ino, fd, 0, nodes};
        nodes = node;
    }
    node->lookups++;
    pthread_mutex_unlock(&tables);
    entry->ino = (uintptr_t)node;
    return 0;
}

static void forget(fuse_ino_t id, uint64_t count) {
    if (id == FUSE_ROOT_ID)
        return;
    pthread_mutex_lock(&tables);
    struct node *node = node_of(id);
    node->lookups -= count;
    if (node->lookups == 0) {
        struct node **link = &nodes;
        while (*link != node)
            link = &(*link)->next;
        *link = node->next;
        close(node->fd);
        free(node);
    }
    pthread_mutex_unlock(&tables);
}

static void reply_entry(fuse_req_t req, fuse_ino_t parent, const char *name) {
    struct fuse_entry_param entry;
    int error = look_up(parent, name, &entry);
    if (error)
        fuse_reply_err(req, error);
    else
        fuse_reply_entry(req, &entry);
}

static void on_lookup(fuse_req_t req, fuse_ino_t parent, const char *name) {
    reply_entry(req, parent, name);
}

static void on_forget(fuse_req_t req, fuse_ino_t id, uint64_t count) {
    forget(id, count);
    fuse_reply_none(req);
}

static void on_getattr(fuse_req_t req, fuse_ino_t id, struct fuse_file_info *file) {
    (void)file;
    struct stat found;
    if (fstatat(fd_of(id), "", &found, AT_EMPTY_PATH | AT_SYMLINK_NOFOLLOW) == -1)
        fuse_reply_err(req, errno);
    else
        fuse_reply_attr(req, &found, 0);
}

static int change(fuse_ino_t id, const struct stat *to, int which, struct fuse_file_info *file) {
    struct proc_path path = path_of(id);
    if ((which & FUSE_SET_ATTR_MODE) && chmod(path.text, to->st_mode) == -1)
        return -1;
    if (which & (FUSE_SET_ATTR_UID | FUSE_SET_ATTR_GID)) {
        uid_t uid = which & FUSE_SET_ATTR_UID ? to->st_uid : (uid_t)-1;
        gid_t gid = which & FUSE_SET_ATTR_GID ? to->st_gid : (gid_t)-1;
        if (fchownat(fd_of(id), "", uid, gid, AT_EMPTY_PATH | AT_SYMLINK_NOFOLLOW) == -1)
            return -1;
    }
    if ((which & FUSE_SET_ATTR_SIZE) &&
        (file ? ftruncate((int)file->fh, to->st_size) : truncate(path.text, to->st_size)) == -1)
        return -1;
    if (which & (FUSE_SET_ATTR_ATIME | FUSE_SET_ATTR_MTIME)) {
        struct timespec times[2] = {{0, UTIME_OMIT}, {0, UTIME_OMIT}};
        if (which & FUSE_SET_ATTR_ATIME_NOW)
            times[0].tv_nsec = UTIME_NOW;
        else if (which & FUSE_SET_ATTR_ATIME)
            times[0] = to->st_atim;
        if (which & FUSE_SET_ATTR_MTIME_NOW)
            times[1].tv_nsec = UTIME_NOW;
        else if (which & FUSE_SET_ATTR_MTIME)
            times[1] = to->st_mtim;
        if (utimensat(AT_FDCWD, path.text, times, 0) == -1)
            return -1;
    }
    return 0;
}

static void on_setattr(fuse_req_t req, fuse_ino_t id, struct stat *to, int which,
                       struct fuse_file_info *file) {
    if (change(id, to, which, file) == -1)
        fuse_reply_err(req, errno);
    else
        on_getattr(req, id, file);
}

/* ---- names ---- */

static void on_mkdir(fuse_req_t req, fuse_ino_t parent, const char *name, mode_t mode) {
    if (mkdirat(fd_of(parent), name, mode) == -1)
        fuse_reply_err(req, errno);
    else
        reply_entry(req, parent, name);
}

static void on_symlink(fuse_req_t req, const char *target, fuse_ino_t parent, const char *name) {
    if (symlinkat(target, fd_of(parent), name) == -1)
        fuse_reply_err(req, errno);
    else
        reply_entry(req, parent, name);
}

static void on_link(fuse_req_t req, fuse_ino_t id, fuse_ino_t parent, const char *name) {
    if (linkat(AT_FDCWD, path_of(id).text, fd_of(parent), name, AT_SYMLINK_FOLLOW) == -1)
        fuse_reply_err(req, errno);
    else
        reply_entry(req, parent, name);
}

static void on_readlink(fuse_req_t req, fuse_ino_t id) {
    char target[4097];
    ssize_t length = readlinkat(fd_of(id), "", target, sizeof target - 1);
    if (length == -1) {
        fuse_reply_err(req, errno);
        return;
    }
    target[length] = '\0';
    fuse_reply_readlink(req, target);
}

static void on_unlink(fuse_req_t req, fuse_ino_t parent, const char *name) {
    reply_status(req, unlinkat(fd_of(parent), name, 0));
}

static void on_rmdir(fuse_req_t req, fuse_ino_t parent, const char *name) {
    reply_status(req, unlinkat(fd_of(parent), name, AT_REMOVEDIR));
}

static void on_rename(fuse_req_t req, fuse_ino_t from, const char *name, fuse_ino_t to,
                      const char *new_name, unsigned flags) {
    reply_status(req, renameat2(fd_of(from), name, fd_of(to), new_name, flags));
}

/* ---- folders: the handle is a DIR ---- */

static void on_opendir(fuse_req_t req, fuse_ino_t id, struct fuse_file_info *file) {
    int fd = openat(fd_of(id), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *folder = fd == -1 ? NULL : fdopendir(fd);
    if (!folder) {
        fuse_reply_err(req, errno);
        return;
    }
    file->fh = (uintptr_t)folder;
    fuse_reply_open(req, file);
}

static void on_readdir(fuse_req_t req, fuse_ino_t id, size_t size, off_t offset,
                       struct fuse_file_info *file) {
    (void)id;
    DIR *folder = (DIR *)(uintptr_t)file->fh;
    char *reply = malloc(size);
    size_t used = 0;
    if (offset)
        seekdir(folder, offset);
    else
        rewinddir(folder);
    for (struct dirent *item; (item = readdir(folder));) {
        struct stat found = {.st_ino = item->d_ino, .st_mode = (mode_t)item->d_type << 12};
        size_t need = fuse_add_direntry(req, reply + used, size - used, item->d_name, &found,
                                        telldir(folder));
        if (need > size - used)
            break;
        used += need;
    }
    fuse_reply_buf(req, reply, used);
    free(reply);
}

static void on_releasedir(fuse_req_t req, fuse_ino_t id, struct fuse_file_info *file) {
    (void)id;
    closedir((DIR *)(uintptr_t)file->fh);
    fuse_reply_err(req, 0);
}

static void on_fsyncdir(fuse_req_t req, fuse_ino_t id, int data_only, struct fuse_file_info *file) {
    (void)id, (void)data_only;
    reply_status(req, fsync(dirfd((DIR *)(uintptr_t)file->fh)));
}

static void on_statfs(fuse_req_t req, fuse_ino_t id) {
    struct statvfs found;
    if (fstatvfs(fd_of(id), &found) == -1)
        fuse_reply_err(req, errno);
    else
        fuse_reply_statfs(req, &found);
}

/* ---- files: the handle is a descriptor ---- */

static void on_open(fuse_req_t req, fuse_ino_t id, struct fuse_file_info *file) {
    int fd = open(path_of(id).text, (file->flags & ~O_NOFOLLOW) | O_CLOEXEC);
    if (fd == -1) {
        fuse_reply_err(req, errno);
        return;
    }
    file->fh = fd;
    fuse_reply_open(req, file);
}

static void on_create(fuse_req_t req, fuse_ino_t parent, const char *name, mode_t mode,
                      struct fuse_file_info *file) {
    struct fuse_entry_param entry;
    int fd = openat(fd_of(parent), name, file->flags | O_CREAT | O_NOFOLLOW | O_CLOEXEC, mode);
    int error = fd == -1 ? errno : look_up(parent, name, &entry);
    if (error) {
        if (fd != -1)
            close(fd);
        fuse_reply_err(req, error);
        return;
    }
    file->fh = fd;
    fuse_reply_create(req, &entry, file);
}

static void on_read(fuse_req_t req, fuse_ino_t id, size_t size, off_t offset,
                    struct fuse_file_info *file) {
    (void)id;
    char *data = malloc(size);
    ssize_t length = pread((int)file->fh, data, size, offset);
    if (length == -1)
        fuse_reply_err(req, errno);
    else
        fuse_reply_buf(req, data, length);
    free(data);
}

static void on_write(fuse_req_t req, fuse_ino_t id, const char *data, size_t size, off_t offset,
                     struct fuse_file_info *file) {
    (void)id;
    ssize_t length = pwrite((int)file->fh, data, size, offset);
    if (length == -1)
        fuse_reply_err(req, errno);
    else
        fuse_reply_write(req, length);
}

static void on_fsync(fuse_req_t req, fuse_ino_t id, int data_only, struct fuse_file_info *file) {
    (void)id;
    reply_status(req, data_only ? fdatasync((int)file->fh) : fsync((int)file->fh));
}

/* ---- byte-range locks ---- */

/* The claim of an owner on a file, made if it has none; a null pointer sets errno. */
static struct claim *claim_of(fuse_ino_t id, const struct fuse_file_info *file) {
    struct node *node = node_of(id);
    struct claim *claim = claims;
    while (claim && (claim->node != node || claim->owner != file->lock_owner))
        claim = claim->next;
    if (claim)
        return claim;
    int fd = open(path_of(id).text, O_RDWR | O_CLOEXEC);
    if (fd == -1)
        return NULL;
    claim = calloc(1, sizeof *claim);
    *claim = (struct claim){node, file->lock_owner, file->fh, fd, claims};
    claims = claim;
    return claim;
}

static void drop(struct claim **link) {
    struct claim *claim = *link;
    *link = claim->next;
    close(claim->fd); /* releases its locks */
    free(claim);
}

/* F_OFD_GETLK or F_OFD_SETLK; 0 or an errno. */
static int apply(fuse_ino_t id, const struct fuse_file_info *file, int command,
                 struct flock *range) {
    pthread_mutex_lock(&tables);
    struct claim *claim = claim_of(id, file);
    range->l_pid = 0; /* as the kernel demands */
    int error = claim && fcntl(claim->fd, command, range) == 0 ? 0 : errno;
    range->l_pid = 0; /* not known across nodes */
    pthread_mutex_unlock(&tables);
    return error;
}

static void on_getlk(fuse_req_t req, fuse_ino_t id, struct fuse_file_info *file,
                     struct flock *range) {
    int error = apply(id, file, F_OFD_GETLK, range);
    if (error)
        fuse_reply_err(req, error);
    else
        fuse_reply_lock(req, range);
}

/* A caller that waits for a lock. */
struct wait {
    fuse_req_t req;
    fuse_ino_t id;
    struct fuse_file_info file;
    struct flock range;
};

static void *wait_for_lock(void *argument) {
    struct wait *wait = argument;
    int error;
    for (;;) {
        error = apply(wait->id, &wait->file, F_OFD_SETLK, &wait->range);
        if (error != EAGAIN && error != EACCES)
            break;
        if (fuse_req_interrupted(wait->req)) {
            error = EINTR;
            break;
        }
        usleep(LOCK_POLL_US);
    }
    fuse_reply_err(wait->req, error);
    free(wait);
    return NULL;
}

static void on_setlk(fuse_req_t req, fuse_ino_t id, struct fuse_file_info *file,
                     struct flock *range, int may_wait) {
    if (!may_wait) {
        fuse_reply_err(req, apply(id, file, F_OFD_SETLK, range));
        return;
    }
    /* In a thread of its own: the unlock that it waits for must find one free. */
    struct wait *wait = calloc(1, sizeof *wait);
    *wait = (struct wait){req, id, *file, *range};
    pthread_t thread;
    int error = pthread_create(&thread, NULL, wait_for_lock, wait);
    if (error) {
        fuse_reply_err(req, error);
        free(wait);
    } else {
        pthread_detach(thread);
    }
}

/*
 * A process closed a descriptor, or ended: all its locks on the file are gone, as POSIX has it. (The
 * owner here is always a process; open file descriptions have other numbers.)
 */
static void on_flush(fuse_req_t req, fuse_ino_t id, struct fuse_file_info *file) {
    pthread_mutex_lock(&tables);
    for (struct claim **link = &claims; *link;) {
        if ((*link)->node == node_of(id) && (*link)->owner == file->lock_owner)
            drop(link);
        else
            link = &(*link)->next;
    }
    pthread_mutex_unlock(&tables);
    fuse_reply_err(req, 0);
}

/* The last descriptor of an open file description was closed. */
static void on_release(fuse_req_t req, fuse_ino_t id, struct fuse_file_info *file) {
    pthread_mutex_lock(&tables);
    for (struct claim **link = &claims; *link;) {
        struct claim *claim = *link;
        if (claim->node != node_of(id) || claim->handle != file->fh) {
            link = &claim->next;
        } else if (leak_ofd) {
            claim->node = NULL; /* so that nobody can inherit it by chance */
            link = &claim->next;
        } else {
            drop(link);
        }
    }
    pthread_mutex_unlock(&tables);
    close((int)file->fh);
    fuse_reply_err(req, 0);
}

/* ---- start and end ---- */

static void on_init(void *data, struct fuse_conn_info *connection) {
    (void)data, (void)connection;
    puts("ready");
    fflush(stdout);
}

static const struct fuse_lowlevel_ops operations = {
    .init = on_init,
    .lookup = on_lookup,
    .forget = on_forget,
    .getattr = on_getattr,
    .setattr = on_setattr,
    .readlink = on_readlink,
    .mkdir = on_mkdir,
    .unlink = on_unlink,
    .rmdir = on_rmdir,
    .symlink = on_symlink,
    .rename = on_rename,
    .link = on_link,
    .open = on_open,
    .read = on_read,
    .write = on_write,
    .flush = on_flush,
    .release = on_release,
    .fsync = on_fsync,
    .opendir = on_opendir,
    .readdir = on_readdir,
    .releasedir = on_releasedir,
    .fsyncdir = on_fsyncdir,
    .statfs = on_statfs,
    .create = on_create,
    .getlk = on_getlk,
    .setlk = on_setlk,
    /* no .flock: it stays local; no .access: the kernel checks (default_permissions) */
};

int main(int count, char **arguments) {
    leak_ofd = count == 4 && strcmp(arguments[3], "--leak-ofd") == 0;
    if (count != 3 && !leak_ofd) {
        fprintf(stderr, "usage: %s BACK MOUNT [--leak-ofd]\n", arguments[0]);
        return 2;
    }
    prctl(PR_SET_PDEATHSIG, SIGTERM); /* no mount outlives the tests, however they end */
    umask(0);                         /* the kernel has applied the caller's */
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max; /* each known node keeps a descriptor */
    setrlimit(RLIMIT_NOFILE, &files);
    root.fd = open(arguments[1], O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (root.fd == -1) {
        perror(arguments[1]);
        return 1;
    }

    char *options[] = {"lockfs", "-oallow_other,default_permissions,fsname=lockfs", NULL};
    struct fuse_args parsed = FUSE_ARGS_INIT(2, options);
    struct fuse_session *session =
        fuse_session_new(&parsed, &operations, sizeof operations, NULL);
    if (!session || fuse_set_signal_handlers(session) != 0 ||
        fuse_session_mount(session, arguments[2]) != 0)
        return 1;
    int result = fuse_session_loop_mt(session, 0);
    fuse_session_unmount(session);
    fuse_remove_signal_handlers(session);
    fuse_session_destroy(session);
    return result == 0 ? 0 : 1;
}
