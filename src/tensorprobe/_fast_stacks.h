/* The user's stack as bytes: of each frame that is shown, the address of its code and the offset of its instruction.
 *
 * A walker knows which code objects are shown. `meet(code)` in Python decides that, once for each, and keeps the code alive,
 * so that no other gets its address. stacks.py does the same with tuples.
 */
#define WALKER "tensorprobe.fast.walker"
#define FRAMES_AT_FIRST 128

typedef struct {
    uintptr_t code; /* 0: empty */
    int shown;
} MetCode;

typedef struct {
    PyObject *frame_type;
    MetCode *met;
    size_t used, mask;
} Walker;

typedef struct {
    uintptr_t code;
    intptr_t instruction;
} WalkedFrame;

static PyObject *s_f_back, *s_f_lasti;

static void drop_walker(Walker *walker) {
    Py_XDECREF(walker->frame_type);
    PyMem_Free(walker->met);
    PyMem_Free(walker);
}

static void free_walker(PyObject *capsule) {
    Walker *walker = PyCapsule_GetPointer(capsule, WALKER);
    if (walker != NULL) drop_walker(walker);
}

/* walker(frame_type) */
static PyObject *make_walker(PyObject *module, PyObject *frame_type) {
    (void)module;
    if (!PyType_Check(frame_type)) return PyErr_Format(PyExc_TypeError, "walker(type of frames)"), NULL;
    Walker *walker = PyMem_Calloc(1, sizeof *walker);
    if (walker == NULL) return PyErr_NoMemory();
    Py_INCREF(frame_type);
    walker->frame_type = frame_type;
    walker->mask = 255;
    walker->met = PyMem_Calloc(walker->mask + 1, sizeof *walker->met);
    PyObject *capsule = walker->met == NULL ? PyErr_NoMemory() : PyCapsule_New(walker, WALKER, free_walker);
    if (capsule == NULL) drop_walker(walker);
    return capsule;
}

static MetCode *seek_code(MetCode *met, size_t mask, uintptr_t code) {
    size_t at = (size_t)((uint64_t)code * UINT64_C(0x9E3779B97F4A7C15) >> 32) & mask;
    while (met[at].code && met[at].code != code) at = (at + 1) & mask;
    return &met[at];
}

static int grow_met(Walker *walker) {
    const size_t mask = 2 * walker->mask + 1;
    MetCode *larger = PyMem_Calloc(mask + 1, sizeof *larger);
    if (larger == NULL) return PyErr_NoMemory(), -1;
    for (size_t i = 0; i <= walker->mask; i++)
        if (walker->met[i].code) *seek_code(larger, mask, walker->met[i].code) = walker->met[i];
    PyMem_Free(walker->met);
    walker->met = larger;
    walker->mask = mask;
    return 0;
}

/* 1 or 0: whether frames of this code are shown; -1 on error. */
static int is_shown(Walker *walker, PyObject *code, PyObject *meet) {
    const uintptr_t address = (uintptr_t)code;
    const MetCode *known = seek_code(walker->met, walker->mask, address);
    if (known->code) return known->shown;
    PyObject *answer = PyObject_CallFunctionObjArgs(meet, code, NULL);
    if (answer == NULL) return -1;
    const int shown = answer == Py_True;
    Py_DECREF(answer);
    if (2 * walker->used >= walker->mask && grow_met(walker)) return -1;
    MetCode *place = seek_code(walker->met, walker->mask, address); /* `meet` may have run other code meanwhile */
    walker->used += !place->code;
    *place = (MetCode){address, shown};
    return shown;
}

/* What a walk has found so far; `few` serves nearly all stacks. */
typedef struct {
    WalkedFrame few[FRAMES_AT_FIRST], *frames;
    size_t used, room;
} Walk;

static int add_frame(Walk *walk, PyObject *code, PyObject *frame) {
    PyObject *lasti = PyObject_GetAttr(frame, s_f_lasti);
    const long instruction = lasti == NULL ? -1 : PyLong_AsLong(lasti);
    Py_XDECREF(lasti);
    if (instruction == -1 && PyErr_Occurred()) return -1;
    if (walk->used == walk->room) {
        WalkedFrame *more = PyMem_Malloc(2 * walk->room * sizeof *more);
        if (more == NULL) return PyErr_NoMemory(), -1;
        memcpy(more, walk->frames, walk->used * sizeof *more);
        if (walk->frames != walk->few) PyMem_Free(walk->frames);
        walk->frames = more;
        walk->room *= 2;
    }
    walk->frames[walk->used++] = (WalkedFrame){(uintptr_t)code, (intptr_t)instruction};
    return 0;
}

/* From `frame` (a new reference, given back here) outwards to the outermost, or to `end`: 1 when it was met, 0, or -1 on error. */
static int walk_frames(Walker *walker, Walk *walk, PyObject *frame, PyObject *end, PyObject *meet) {
    int result = 0;
    while (frame != NULL && frame != Py_None && frame != end) {
        if ((PyObject *)Py_TYPE(frame) != walker->frame_type) {
            PyErr_SetString(PyExc_TypeError, "a stack is made of frames");
            break;
        }
        PyObject *code = (PyObject *)PyFrame_GetCode((PyFrameObject *)frame);
        const int shown = is_shown(walker, code, meet), failed = shown < 0 || (shown && add_frame(walk, code, frame));
        Py_DECREF(code);
        if (failed) break;
        PyObject *back = PyObject_GetAttr(frame, s_f_back);
        Py_DECREF(frame);
        frame = back;
    }
    if (PyErr_Occurred()) result = -1;
    else if (frame == end) result = 1;
    Py_XDECREF(frame);
    return result;
}

/* walk(walker, frame or None, end or None, key of the stack from `end` on, meet) -> key, as bytes */
static PyObject *walk_stack(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    (void)module;
    if (nargs != 5 || !PyBytes_Check(args[3])) {
        PyErr_SetString(PyExc_TypeError, "walk(walker, frame, end, bytes, meet)");
        return NULL;
    }
    Walker *walker = PyCapsule_GetPointer(args[0], WALKER);
    if (walker == NULL) return NULL;
    Walk walk = {.frames = walk.few, .room = FRAMES_AT_FIRST};
    Py_INCREF(args[1]);
    const int met_end = walk_frames(walker, &walk, args[1], args[2] == Py_None ? NULL : args[2], args[4]);
    PyObject *key = NULL;
    if (met_end >= 0) {
        const Py_ssize_t inner = (Py_ssize_t)(walk.used * sizeof *walk.frames), outer = met_end ? PyBytes_Size(args[3]) : 0;
        key = PyBytes_FromStringAndSize(NULL, inner + outer);
        if (key != NULL) {
            memcpy(PyBytes_AsString(key), walk.frames, (size_t)inner);
            memcpy(PyBytes_AsString(key) + inner, PyBytes_AsString(args[3]), (size_t)outer);
        }
    }
    if (walk.frames != walk.few) PyMem_Free(walk.frames);
    return key;
}
