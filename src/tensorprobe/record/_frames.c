/* What the recorder does for every call, in C: frames of the pipe to lines of calls.jsonl, with the statistics and digests of
 * the tensors that they name, and new bytes into the buffer of tensors.bin. Stable ABI.
 *
 * Only plain frames are taken: a call or nothing, whole tensors of at most LARGEST bytes, everything written as `_json.h` knows
 * it. Whatever else comes is left to recorder.py, which also does everything where this file is not built; tests hold the two
 * against each other. A frame is looked at as a whole before anything is done for it, so one that is left has had no effect.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#if defined(__GNUC__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function" /* not all of the buffer and of the arithmetic is needed here */
#endif
#include "../_fast_pack.h"
#include "../numerics/_moments.h"
#if defined(__GNUC__)
#pragma GCC diagnostic pop
#endif
#include "_json.h"

#ifndef PyBUF_READ /* Python 3.10 has it, but not in the stable ABI */
#define PyBUF_READ 0x100
#endif
#define ALIGNMENT 64
#define LARGEST (256 * 1024)   /* beyond it, what Python costs is nothing beside the work, and the lock is handed over */
#define ROUND_BYTES (1 << 20)  /* so much of the ring at a time: then others may have the lock */
#define NOT_KEPT (-1)
#define CAPSULE "tensorprobe.record.frames"

enum { ADDRESS, USED, START }; /* of the buffer of tensors.bin: places in the array of `BlobWriter` */

typedef struct {
    PyObject *stored, *tokens_owner, *digest, *store, *moments_type, *stored_type;
    const char *ring;
    int64_t ring_size, buffer_bytes, *tokens, *consumed;
    int keep_data;
} Recorder;

typedef struct {
    int64_t position, nbytes, dtype;
} Piece;

typedef struct {
    Figures figures;
    PyObject *digest;
    int64_t nbytes, offset;
} Kept;

/* The bytes of this step: `place` is NULL until Python has opened the file, and `leave` set when Python may have changed it. */
typedef struct {
    int64_t *place, limit;
    PyObject *offsets;
    int leave;
} Blob;

typedef struct {
    Draft draft;
    Buffer pieces, kept, lines;
} Room;

static void drop_kept(Buffer *kept) {
    Kept *all = (Kept *)kept->bytes;
    for (size_t i = 0; i < kept->used / sizeof *all; i++) Py_XDECREF(all[i].digest);
    kept->used = 0;
}

static void drop_room(Room *room) {
    drop_kept(&room->kept);
    drop_buffer(&room->draft.line);
    drop_buffer(&room->draft.holes);
    drop_buffer(&room->pieces);
    drop_buffer(&room->kept);
    drop_buffer(&room->lines);
}

static int read_piece(const Recorder *self, Reader *r, Buffer *pieces) {
    Value v, position, nbytes, dtype, last;
    if (read_as(r, LIST, &v) || v.length != 4 || read_as(r, WHOLE, &position) || read_as(r, WHOLE, &nbytes) ||
        read_as(r, WHOLE, &dtype) || read_as(r, YES, &last))
        return -1;
    const Piece piece = {position.number, nbytes.number, dtype.number};
    if (piece.position < 0 || piece.nbytes < 0 || piece.nbytes > LARGEST || piece.dtype < 0 || piece.dtype >= DTYPES ||
        piece.position % self->ring_size > self->ring_size - piece.nbytes)
        return -1;
    put_bytes(pieces, &piece, sizeof piece);
    return 0;
}

/* 1 for a plain frame: its pieces and the draft of its line are in `room`. 0 for another one. */
static int read_frame(const Recorder *self, Reader *r, Room *room) {
    Value frame, pieces;
    room->draft.line.used = room->draft.holes.used = room->pieces.used = 0;
    if (read_as(r, LIST, &frame) || !frame.length || frame.length > 2 || read_as(r, LIST, &pieces)) return 0;
    for (uint64_t i = 0; i < pieces.length; i++)
        if (read_piece(self, r, &room->pieces)) return 0;
    if (frame.length == 2 && put_struct(r, &room->draft, event_fields, 1)) return 0;
    return r->at == r->end;
}

static PyObject *key_of(PyObject *digest, int64_t nbytes) {
    PyObject *number = PyLong_FromLongLong(nbytes);
    PyObject *key = number == NULL ? NULL : PyTuple_Pack(2, digest, number);
    Py_XDECREF(number);
    return key;
}

/* The offset of bytes that are in the file or its buffer already, or fit into it; NOT_KEPT where Python has to be asked. -2: an error. */
static int64_t place_in_buffer(const Recorder *self, const Blob *blob, const Kept *kept, const char *bytes) {
    PyObject *key = key_of(kept->digest, kept->nbytes);
    if (key == NULL) return -2;
    PyObject *known = PyDict_GetItemWithError(blob->offsets, key);
    int64_t offset = known != NULL ? PyLong_AsLongLong(known) : PyErr_Occurred() ? -2 : NOT_KEPT;
    const int64_t used = blob->place[USED], end = used + kept->nbytes, next = (end + ALIGNMENT - 1) & -(int64_t)ALIGNMENT;
    if (offset == NOT_KEPT && next < self->buffer_bytes && blob->place[START] + end <= blob->limit) {
        PyObject *number = PyLong_FromLongLong(blob->place[START] + used);
        if (number == NULL || PyDict_SetItem(blob->offsets, key, number)) {
            offset = -2;
        } else {
            char *to = (char *)(uintptr_t)blob->place[ADDRESS] + used;
            memcpy(to, bytes, (size_t)kept->nbytes);
            memset(to + kept->nbytes, 0, (size_t)(next - end));
            blob->place[USED] = next;
            offset = blob->place[START] + used;
        }
        Py_XDECREF(number);
    }
    Py_DECREF(key);
    return offset;
}

/* Decide where the bytes are kept: `TensorStore.store`. */
static int place(const Recorder *self, Blob *blob, Kept *kept, PyObject *view, const char *bytes) {
    kept->offset = self->keep_data ? 0 : NOT_KEPT;
    if (!self->keep_data || !kept->nbytes) return 0;
    if (blob->place != NULL && !blob->leave) {
        kept->offset = place_in_buffer(self, blob, kept, bytes);
        if (kept->offset != NOT_KEPT) return kept->offset < 0 ? -1 : 0;
    }
    blob->leave = 1;
    PyObject *offset = PyObject_CallFunctionObjArgs(self->store, view, kept->digest, NULL);
    if (offset == NULL) return -1;
    kept->offset = offset == Py_None ? NOT_KEPT : PyLong_AsLongLong(offset);
    Py_DECREF(offset);
    return PyErr_Occurred() ? -1 : 0;
}

static int keep(const Recorder *self, Blob *blob, const Piece *piece, Kept *kept) {
    const Kind *kind = &kinds[piece->dtype];
    const char *bytes = self->ring + piece->position % self->ring_size;
    kept->nbytes = piece->nbytes;
    kept->figures = summarize_exactly(kind, bytes, piece->nbytes / (int64_t)(kind->parts * kind->value_size));
    PyObject *view = PyMemoryView_FromMemory((char *)(uintptr_t)bytes, (Py_ssize_t)piece->nbytes, PyBUF_READ);
    if (view == NULL) return -1;
    kept->digest = PyObject_CallFunctionObjArgs(self->digest, view, NULL);
    const int failed = kept->digest == NULL || place(self, blob, kept, view, bytes);
    Py_DECREF(view);
    return failed ? -1 : 0;
}

static int keep_all(Recorder *self, Blob *blob, Room *room) {
    const size_t n = room->pieces.used / sizeof(Piece);
    Kept *kept = (Kept *)more_room(&room->kept, n * sizeof *kept);
    if (kept == NULL && n) return PyErr_NoMemory(), -1;
    if (n) memset(kept, 0, n * sizeof *kept);
    for (size_t i = 0; i < n; i++) {
        const Piece *piece = (const Piece *)room->pieces.bytes + i;
        if (keep(self, blob, piece, &kept[i])) return -1;
        __atomic_store_n(self->consumed, piece->position + piece->nbytes, __ATOMIC_RELEASE); /* the trainer may write there now */
    }
    return 0;
}

static void put_figure(Buffer *b, double figure) {
    if (figure - figure == 0) put_real(b, figure);
    else put_string(b, figure != figure ? "\"NaN\"" : figure > 0 ? "\"Infinity\"" : "\"-Infinity\"");
    put_byte(b, ',');
}

static int put_kept(Buffer *b, const Kept *kept) {
    Py_ssize_t n;
    const char *digest = PyUnicode_AsUTF8AndSize(kept->digest, &n);
    if (digest == NULL) return -1;
    put_string(b, ",\"summary\":[");
    put_figure(b, kept->figures.max);
    put_figure(b, kept->figures.min);
    put_figure(b, kept->figures.mean);
    put_figure(b, kept->figures.norm);
    put_whole(b, kept->figures.nan);
    put_byte(b, ',');
    put_whole(b, kept->figures.inf);
    put_string(b, "],\"digest\":\"");
    put_bytes(b, digest, (size_t)n);
    put_string(b, "\",\"nbytes\":");
    put_whole(b, kept->nbytes);
    if (kept->offset == NOT_KEPT) return 0;
    put_string(b, ",\"offset\":");
    put_whole(b, kept->offset);
    return 0;
}

/* What is known of a tensor that came with an earlier frame: it is taken out of `stored`. */
static int recall(const Recorder *self, int64_t token, Kept *kept) {
    PyObject *key = PyLong_FromLongLong(token), *found = NULL, *offset = NULL;
    if (key == NULL) return -1;
    long long nan, inf, nbytes;
    found = PyDict_GetItemWithError(self->stored, key);
    if (found == NULL && !PyErr_Occurred()) PyErr_SetObject(PyExc_KeyError, key);
    Figures *f = &kept->figures;
    const int sound = found != NULL && PyTuple_Check(found) &&
                      PyArg_ParseTuple(found, "(ddddLL)ULO", &f->max, &f->min, &f->mean, &f->norm, &nan, &inf, &kept->digest, &nbytes, &offset);
    if (sound) {
        f->nan = nan, f->inf = inf, kept->nbytes = nbytes;
        kept->offset = offset == Py_None ? NOT_KEPT : PyLong_AsLongLong(offset);
        Py_INCREF(kept->digest);
    } else {
        kept->digest = NULL;
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "what is stored of a tensor is a tuple");
    }
    const int failed = !sound || PyErr_Occurred() || PyDict_DelItem(self->stored, key);
    Py_DECREF(key);
    return failed ? -1 : 0;
}

static int put_line(const Recorder *self, Room *room, int64_t first) {
    const size_t n = room->kept.used / sizeof(Kept), holes = room->draft.holes.used / sizeof(Hole);
    Kept *all = (Kept *)room->kept.bytes;
    size_t done = 0;
    if (room->lines.used) put_byte(&room->lines, '\n');
    for (size_t i = 0; i < holes; i++) {
        const Hole *hole = (const Hole *)room->draft.holes.bytes + i;
        const uint64_t at = (uint64_t)(hole->token - first);
        Kept earlier = {.digest = NULL}, *kept = at < n ? &all[at] : &earlier;
        if (kept == &earlier ? recall(self, hole->token, kept) : kept->digest == NULL) {
            if (!PyErr_Occurred()) PyErr_SetString(PyExc_KeyError, "a tensor that two slots name");
            Py_XDECREF(earlier.digest);
            return -1;
        }
        put_bytes(&room->lines, room->draft.line.bytes + done, hole->at - done);
        done = hole->at;
        const int failed = put_kept(&room->lines, kept);
        Py_CLEAR(kept->digest); /* taken */
        if (failed) return -1;
    }
    put_bytes(&room->lines, room->draft.line.bytes + done, room->draft.line.used - done);
    return 0;
}

/* Put aside the tensors that no slot of this frame has named: a later one will. */
static int put_aside(const Recorder *self, const Buffer *kept, int64_t first) {
    const Kept *all = (const Kept *)kept->bytes;
    for (size_t i = 0; i < kept->used / sizeof *all; i++) {
        if (all[i].digest == NULL) continue;
        const Figures *f = &all[i].figures;
        PyObject *moments = PyObject_CallFunction(self->moments_type, "ddddLL", f->max, f->min, f->mean, f->norm, (long long)f->nan, (long long)f->inf);
        PyObject *offset = all[i].offset == NOT_KEPT ? NULL : PyLong_FromLongLong(all[i].offset);
        PyObject *token = PyLong_FromLongLong(first + (int64_t)i);
        PyObject *stored = moments == NULL || PyErr_Occurred() ? NULL : PyObject_CallFunction(self->stored_type, "OOLO", moments, all[i].digest, (long long)all[i].nbytes, offset ? offset : Py_None);
        const int failed = token == NULL || stored == NULL || PyDict_SetItem(self->stored, token, stored);
        Py_XDECREF(moments);
        Py_XDECREF(offset);
        Py_XDECREF(token);
        Py_XDECREF(stored);
        if (failed) return -1;
    }
    return 0;
}

/* Do what a frame says that was read into `room`. */
static int take_frame(Recorder *self, Blob *blob, Room *room) {
    const int64_t first = *self->tokens;
    int failed = keep_all(self, blob, room);
    *self->tokens += (int64_t)(room->pieces.used / sizeof(Piece));
    failed = failed || (room->draft.line.used && put_line(self, room, first)) || put_aside(self, &room->kept, first);
    drop_kept(&room->kept);
    return failed ? -1 : 0;
}

static int64_t little_endian(const unsigned char *at) { return at[0] | at[1] << 8 | at[2] << 16 | (int64_t)at[3] << 24; }

/* Take frames from `at` on, as long as they are plain. Returns where the next one begins, or -1 with an error. */
static Py_ssize_t take_frames(Recorder *self, PyObject *data, Py_ssize_t at, Blob *blob, Room *room, long long *calls) {
    int64_t taken = 0;
    while (!blob->leave && taken < ROUND_BYTES) {
        const unsigned char *bytes = (const unsigned char *)PyByteArray_AsString(data);
        const Py_ssize_t size = PyByteArray_Size(data);
        if (size - at < 4 || little_endian(bytes + at) > size - at - 4) break;
        const Py_ssize_t end = at + 4 + (Py_ssize_t)little_endian(bytes + at);
        Reader reader = {bytes + at + 4, bytes + end};
        if (!read_frame(self, &reader, room)) break;
        if (room->draft.line.failed || room->draft.holes.failed || room->pieces.failed) return PyErr_NoMemory(), -1;
        for (size_t i = 0; i < room->pieces.used / sizeof(Piece); i++) taken += ((const Piece *)room->pieces.bytes)[i].nbytes;
        if (take_frame(self, blob, room)) return -1;
        taken += end - at;
        *calls += room->draft.line.used != 0;
        at = end;
    }
    return at;
}

/* take(recorder, data, at, blob, limit) -> (at, lines, calls): `blob` is (address of its array, its offsets) or None. */
static PyObject *take(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *capsule, *data, *opened;
    Py_ssize_t at;
    long long limit, calls = 0, address = 0;
    if (!PyArg_ParseTuple(args, "OO!nOL:take", &capsule, &PyByteArray_Type, &data, &at, &opened, &limit)) return NULL;
    Recorder *self = PyCapsule_GetPointer(capsule, CAPSULE);
    Blob blob = {.limit = limit};
    if (self == NULL) return NULL;
    if (opened != Py_None) {
        if (!PyTuple_Check(opened) || !PyArg_ParseTuple(opened, "LO!", &address, &PyDict_Type, &blob.offsets))
            return PyErr_Format(PyExc_TypeError, "a blob is (address, offsets)");
        blob.place = (int64_t *)(uintptr_t)address;
    }
    if (at < 0 || at > PyByteArray_Size(data)) return PyErr_Format(PyExc_ValueError, "no such place in the data: %zd", at);
    Room room;
    memset(&room, 0, sizeof room);
    at = take_frames(self, data, at, &blob, &room, &calls);
    if (at >= 0 && room.lines.failed) PyErr_NoMemory(), at = -1;
    PyObject *result = at < 0 ? NULL : Py_BuildValue("(ny#L)", at, room.lines.bytes ? (char *)room.lines.bytes : "", (Py_ssize_t)room.lines.used, calls);
    drop_room(&room);
    return result;
}

static void drop_recorder(Recorder *self) {
    Py_XDECREF(self->stored);
    Py_XDECREF(self->tokens_owner);
    Py_XDECREF(self->digest);
    Py_XDECREF(self->store);
    Py_XDECREF(self->moments_type);
    Py_XDECREF(self->stored_type);
    PyMem_Free(self);
}

static void free_recorder(PyObject *capsule) {
    Recorder *self = PyCapsule_GetPointer(capsule, CAPSULE);
    if (self != NULL) drop_recorder(self);
}

static int read_powers(const char *bytes, Py_ssize_t nbytes) {
    if (nbytes != (Py_ssize_t)sizeof powers) return PyErr_Format(PyExc_ValueError, "expected %d powers of ten", POWERS), -1;
    memcpy(powers, bytes, sizeof powers);
    return 0;
}

/* recorder(stored, tokens, tokens_address, digest, store, moments_type, stored_type, ring_address, ring_size, consumed_address,
 * buffer_bytes, keep_data, powers) */
static PyObject *recorder(PyObject *module, PyObject *args) {
    (void)module;
    Recorder found = {.keep_data = 0};
    long long tokens, ring, size, consumed, buffer;
    const char *bytes;
    Py_ssize_t nbytes;
    if (!PyArg_ParseTuple(args, "O!OLOOOOLLLLpy#:recorder", &PyDict_Type, &found.stored, &found.tokens_owner, &tokens, &found.digest,
                          &found.store, &found.moments_type, &found.stored_type, &ring, &size, &consumed, &buffer, &found.keep_data, &bytes, &nbytes))
        return NULL;
    if (tokens <= 0 || ring <= 0 || size <= 0 || consumed <= 0 || buffer <= 0)
        return PyErr_Format(PyExc_ValueError, "addresses and sizes are positive");
    if (read_powers(bytes, nbytes)) return NULL;
    Recorder *self = PyMem_Calloc(1, sizeof *self);
    if (self == NULL) return PyErr_NoMemory();
    *self = found;
    self->tokens = (int64_t *)(uintptr_t)tokens;
    self->ring = (const char *)(uintptr_t)ring;
    self->consumed = (int64_t *)(uintptr_t)consumed;
    self->ring_size = size;
    self->buffer_bytes = buffer;
    Py_INCREF(self->stored);
    Py_INCREF(self->tokens_owner);
    Py_INCREF(self->digest);
    Py_INCREF(self->store);
    Py_INCREF(self->moments_type);
    Py_INCREF(self->stored_type);
    PyObject *capsule = PyCapsule_New(self, CAPSULE, free_recorder);
    if (capsule == NULL) drop_recorder(self);
    return capsule;
}

/* json_of(number, powers): a finite double as it stands in a line. */
static PyObject *json_of(PyObject *module, PyObject *args) {
    (void)module;
    double number;
    const char *bytes;
    Py_ssize_t nbytes;
    char text[NUMBER_TEXT];
    if (!PyArg_ParseTuple(args, "dy#:json_of", &number, &bytes, &nbytes) || read_powers(bytes, nbytes)) return NULL;
    if (number - number != 0) return PyErr_Format(PyExc_ValueError, "JSON has no such number");
    return PyBytes_FromStringAndSize(text, write_double(text, number));
}

static PyMethodDef methods[] = {
    {"recorder", recorder, METH_VARARGS, "What `take` needs to know of a recorder."},
    {"take", take, METH_VARARGS, "Record the plain frames at the beginning of the data."},
    {"json_of", json_of, METH_VARARGS, "A finite number as JSON."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_frames", "Frames of the pipe to lines of a record.", -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__frames(void) {
    int has_avx2 = 0, has_f16c = 0;
#if HAVE_X86
    __builtin_cpu_init();
    has_avx2 = __builtin_cpu_supports("avx2") != 0;
    has_f16c = has_avx2 && __builtin_cpu_supports("f16c") != 0;
#endif
    prepare_blocks(has_avx2, has_f16c);
    prepare_moments(has_avx2);
    return PyModule_Create(&module);
}
