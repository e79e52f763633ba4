/* The loops of capture that run for every call, in C: naming the tensors among the arguments, copying those that need no
 * care into the ring, or only looking for the greatest magnitude in them. Stable ABI. Whatever is not plain is left to the Python code beside it (flatten.py,
 * snapshot.py), which also does everything where this file is not built; tests hold the two against each other.
 *
 * The caller holds the lock of the ring. Nothing here keeps a reference to a tensor. Making an object can start the
 * garbage collector, and with it any code of the user's: what was read before is looked at again before it is relied on.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__unix__) || defined(__APPLE__)
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>
#endif
#if defined(__SSE2__) || defined(_M_X64)
#include <emmintrin.h>
#define HAVE_STREAMS 1
#endif

#if defined(__GNUC__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function" /* of the arithmetic, peaks are all that is needed here */
#endif
#include "numerics/_peak.h"
#if defined(__GNUC__)
#pragma GCC diagnostic pop
#endif

#define ALIGNMENT 64
#define STREAM_BYTES (16 * 1024) /* from here on a copy past the caches is the faster one */
#define LARGE_BYTES (256 * 1024) /* worth handing over the lock of the interpreter */
#define GREATEST_ITEM 1024
/* An offset into a storage without memory looks like an address, but no storage is as large as this. */
#define LOW_ADDRESSES (UINT64_C(1) << 40)
#define CAPSULE "tensorprobe.fast"

/* What the array holds that Python and this file share. HEAD and FREE_TO are positions, which only grow; POPULATED is a place in the ring. */
enum { HEAD, FREE_TO, POPULATED, TOKENS, BYTES_SEEN, SLOTS_TAKEN };

/* Methods of the tensor type, looked up once; they serve its subclass for parameters too. */
enum { IS_CONTIGUOUS, IS_NEG, IS_CONJ, CONST_DATA_PTR, NUMEL, STORAGE_OFFSET, STRIDE, METHODS };
static const char *const method_names[METHODS] = {"is_contiguous", "is_neg", "is_conj", "const_data_ptr", "numel", "storage_offset", "stride"};

typedef struct {
    PyObject *tensor_type, *parameter_type, *dtypes, *slot_type, *pieces_owner, *cpu;
    PyObject *methods[METHODS];
    char *ring;
    int64_t ring_size, largest;
    int64_t *state;
} Context;

static PyObject *s_dtype, *s_is_cpu, *s_shape, *s_requires_grad, *s_pieces, *s_busy;

/* Addresses are asked for without a right to write, which leaves a lazy clone shared; before torch 2.13 there is only data_ptr. */
static PyObject *find_method(PyObject *tensor_type, int method) {
    PyObject *found = PyObject_GetAttrString(tensor_type, method_names[method]);
    if (found == NULL && method == CONST_DATA_PTR && PyErr_ExceptionMatches(PyExc_AttributeError)) {
        PyErr_Clear();
        found = PyObject_GetAttrString(tensor_type, "data_ptr");
    }
    return found;
}

static void drop_context(Context *c) {
    Py_XDECREF(c->tensor_type);
    Py_XDECREF(c->parameter_type);
    Py_XDECREF(c->dtypes);
    Py_XDECREF(c->slot_type);
    Py_XDECREF(c->pieces_owner);
    Py_XDECREF(c->cpu);
    for (int i = 0; i < METHODS; i++) Py_XDECREF(c->methods[i]);
    PyMem_Free(c);
}

static void free_context(PyObject *capsule) {
    Context *c = PyCapsule_GetPointer(capsule, CAPSULE);
    if (c != NULL) drop_context(c);
}

/* Whether each dtype has its (name, code, size, ...), so that nothing needs to be checked for each tensor. */
static int check_dtypes(PyObject *dtypes) {
    PyObject *key, *row;
    Py_ssize_t at = 0;
    while (PyDict_Next(dtypes, &at, &key, &row)) {
        int sound = PyTuple_Check(row) && PyTuple_Size(row) >= 3 && PyUnicode_Check(PyTuple_GetItem(row, 0)) &&
                    PyLong_Check(PyTuple_GetItem(row, 1)) && PyLong_Check(PyTuple_GetItem(row, 2));
        int overflow = 0;
        long long size = sound ? PyLong_AsLongLongAndOverflow(PyTuple_GetItem(row, 2), &overflow) : 0;
        if (size >= 1 && size <= GREATEST_ITEM && !overflow) continue;
        PyErr_SetString(PyExc_ValueError, "a dtype needs a tuple of its name, its code and its size in bytes");
        return -1;
    }
    return 0;
}

static int check_owner(PyObject *owner) {
    PyObject *pieces = PyObject_GetAttr(owner, s_pieces);
    int sound = pieces != NULL && PyList_Check(pieces);
    Py_XDECREF(pieces);
    if (sound) return 0;
    PyErr_SetString(PyExc_TypeError, "the owner of the ring needs a list `pieces`");
    return -1;
}

static int fill_context(Context *c, PyObject *tensor, PyObject *parameter, PyObject *dtypes, PyObject *slot, PyObject *owner) {
    Py_INCREF(tensor);
    Py_INCREF(parameter);
    Py_INCREF(slot);
    Py_INCREF(owner);
    c->slot_type = slot;
    c->tensor_type = tensor;
    c->parameter_type = parameter;
    c->pieces_owner = owner;
    c->cpu = PyUnicode_InternFromString("cpu");
    if (c->cpu == NULL) return -1;
    c->dtypes = PyDict_Copy(dtypes); /* its rows are borrowed below: nobody else may take one away */
    if (c->dtypes == NULL || check_dtypes(c->dtypes) || check_owner(owner)) return -1;
    for (int i = 0; i < STRIDE; i++) { /* strides are asked for by the scanner only */
        c->methods[i] = find_method(tensor, i);
        if (c->methods[i] != NULL) continue;
        PyErr_Format(PyExc_TypeError, "the tensor type has no method %s", method_names[i]);
        return -1;
    }
    return 0;
}

/* context(tensor_type, parameter_type, dtypes, slot_type, pieces_owner, ring_address, ring_size, state_address, largest) */
static PyObject *context(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *tensor, *parameter, *dtypes, *slot, *owner;
    long long ring, size, state, largest;
    if (!PyArg_ParseTuple(args, "O!O!O!O!OLLLL:context", &PyType_Type, &tensor, &PyType_Type, &parameter, &PyDict_Type,
                          &dtypes, &PyType_Type, &slot, &owner, &ring, &size, &state, &largest)) {
        if (PyErr_ExceptionMatches(PyExc_OverflowError))
            PyErr_SetString(PyExc_ValueError, "an address and a size have at most 63 bits");
        return NULL;
    }
    if (size <= 0 || size > INT64_MAX / 4 || size % ALIGNMENT || largest < 0 || largest > size || ring <= 0 ||
        ring % ALIGNMENT || state <= 0 || state % (long long)sizeof(int64_t)) {
        PyErr_SetString(PyExc_ValueError, "a ring needs an address and a size that are multiples of 64, and room for the largest piece");
        return NULL;
    }
    Context *c = PyMem_Calloc(1, sizeof *c);
    if (c == NULL) return PyErr_NoMemory();
    c->ring = (char *)(uintptr_t)ring;
    c->ring_size = size;
    c->largest = largest;
    c->state = (int64_t *)(uintptr_t)state;
    PyObject *capsule = fill_context(c, tensor, parameter, dtypes, slot, owner) ? NULL : PyCapsule_New(c, CAPSULE, free_context);
    if (capsule == NULL) drop_context(c);
    return capsule;
}

/* 1 when the value is True, 0 when it is anything else, -1 on error. */
static int is_true(PyObject *value) {
    if (value == NULL) return -1;
    int answer = value == Py_True;
    Py_DECREF(value);
    return answer;
}

/* What an attribute is: 1 for True, 0 for anything else, -1 on error. */
static int flag_of(PyObject *object, PyObject *name) {
    return is_true(PyObject_GetAttr(object, name));
}

static PyObject *ask(const Context *c, int method, PyObject *tensor) {
    return PyObject_CallFunctionObjArgs(c->methods[method], tensor, NULL);
}

static int ask_number(const Context *c, int method, PyObject *tensor, unsigned long long *number) {
    PyObject *value = ask(c, method, tensor);
    if (value == NULL) return -1;
    *number = PyLong_AsUnsignedLongLong(value);
    Py_DECREF(value);
    return PyErr_Occurred() ? -1 : 0;
}

/* Whether the bytes at the tensor's address are its values, in row-major order. */
static int is_plain(const Context *c, PyObject *tensor) {
    return is_true(PyObject_GetAttr(tensor, s_is_cpu)) == 1 && is_true(ask(c, IS_CONTIGUOUS, tensor)) == 1 &&
           is_true(ask(c, IS_NEG, tensor)) == 0 && is_true(ask(c, IS_CONJ, tensor)) == 0;
}

/* Where the bytes of a tensor are, in `address`; -1 when it has none: a storage that was given back, or never had memory. */
static int find_bytes(const Context *c, PyObject *tensor, long long itemsize, unsigned long long *address) {
    unsigned long long offset;
    if (ask_number(c, CONST_DATA_PTR, tensor, address)) return -1;
    if (*address >= LOW_ADDRESSES) return 0;
    if (ask_number(c, STORAGE_OFFSET, tensor, &offset)) return -1;
    return *address == offset * (unsigned long long)itemsize ? -1 : 0;
}

/* Where `nbytes` would stand in the ring now; -1 when Python must wait, populate or cut into pieces first. */
static int64_t find_place(const Context *c, int64_t nbytes, int64_t *end) {
    int64_t position = c->state[HEAD];
    if (position < 0 || position > INT64_MAX - 2 * c->ring_size) return -1;
    int64_t room = (nbytes + ALIGNMENT - 1) & -(int64_t)ALIGNMENT, place = position % c->ring_size;
    if (place + room > c->ring_size) {
        position += c->ring_size - place;
        place = 0;
    }
    *end = position + room;
    return *end > c->state[FREE_TO] || place + room > c->state[POPULATED] ? -1 : position;
}

/* slot_type(name, dtype, shape, device, stride, grad, token): model.SlotEvent. */
static PyObject *make_slot(const Context *c, PyObject *name, PyObject *dtype, PyObject *tensor, int64_t token) {
    PyObject *shape = PyObject_GetAttr(tensor, s_shape);
    PyObject *grad = shape == NULL ? NULL : PyObject_GetAttr(tensor, s_requires_grad);
    PyObject *number = grad == NULL ? NULL : PyLong_FromLongLong(token);
    PyObject *slot = number == NULL ? NULL : PyObject_CallFunctionObjArgs(c->slot_type, name, dtype, shape, c->cpu, Py_None, grad, number, NULL);
    Py_XDECREF(shape);
    Py_XDECREF(grad);
    Py_XDECREF(number);
    return slot;
}

/* Copy to a place in the ring without taking it into the caches: this thread never reads it, and what the training has there stays. */
static void copy_past_caches(char *to, const char *from, size_t nbytes) {
    size_t done = 0;
#ifdef HAVE_STREAMS
    for (; done + 64 <= nbytes; done += 64) {
        __m128i a = _mm_loadu_si128((const __m128i *)(from + done)), b = _mm_loadu_si128((const __m128i *)(from + done + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(from + done + 32)), d = _mm_loadu_si128((const __m128i *)(from + done + 48));
        _mm_stream_si128((__m128i *)(to + done), a);
        _mm_stream_si128((__m128i *)(to + done + 16), b);
        _mm_stream_si128((__m128i *)(to + done + 32), c);
        _mm_stream_si128((__m128i *)(to + done + 48), d);
    }
    _mm_sfence();
#endif
    memcpy(to + done, from + done, nbytes - done);
}

/* Copy into the ring and note the piece; -1 when something failed, and then nothing is changed. */
static int put(const Context *c, PyObject *piece, unsigned long long address, int64_t position, int64_t nbytes, int64_t end) {
    PyObject *pieces = PyObject_GetAttr(c->pieces_owner, s_pieces);
    if (pieces == NULL) return -1;
    char *to = c->ring + position % c->ring_size;
    const char *from = (const char *)(uintptr_t)address;
    if (address == 0) { /* it is there already */
    } else if (nbytes >= LARGE_BYTES) {
        Py_BEGIN_ALLOW_THREADS
        copy_past_caches(to, from, (size_t)nbytes);
        Py_END_ALLOW_THREADS
    } else if (nbytes >= STREAM_BYTES) {
        copy_past_caches(to, from, (size_t)nbytes);
    } else if (nbytes) {
        memcpy(to, from, (size_t)nbytes);
    }
    int failed = PyList_Append(pieces, piece);
    Py_DECREF(pieces);
    if (failed) return -1;
    c->state[HEAD] = end;
    c->state[TOKENS] += 1;
    c->state[BYTES_SEEN] += nbytes;
    return 0;
}

/* The slot of one tensor, copied; NULL without an error when it needs care, NULL with one when something failed. */
static PyObject *take_one(const Context *c, PyObject *name, PyObject *tensor) {
    PyObject *type = (PyObject *)Py_TYPE(tensor);
    if (type != c->tensor_type && type != c->parameter_type) return NULL;
    PyObject *dtype = PyObject_GetAttr(tensor, s_dtype);
    if (dtype == NULL) return NULL;
    PyObject *known = PyDict_GetItemWithError(c->dtypes, dtype);
    Py_DECREF(dtype);
    if (known == NULL || !is_plain(c, tensor)) return NULL;
    unsigned long long address = 0, count;
    if (ask_number(c, NUMEL, tensor, &count)) return NULL;
    long long itemsize = PyLong_AsLongLong(PyTuple_GetItem(known, 2));
    if (count > (unsigned long long)(c->largest / itemsize)) return NULL;
    int64_t nbytes = (int64_t)count * itemsize, token = c->state[TOKENS], end;
    int64_t position = find_place(c, nbytes, &end);
    if (position < 0) return NULL;
    PyObject *slot = make_slot(c, name, PyTuple_GetItem(known, 0), tensor, token);
    if (slot == NULL) return NULL;
    PyObject *code = PyTuple_GetItem(known, 1);
    PyObject *piece = Py_BuildValue("(LLOO)", (long long)position, (long long)nbytes, code, Py_True);
    /* The place and the address hold from here on: nothing below makes an object that the garbage collector knows. */
    if (piece == NULL || (nbytes && find_bytes(c, tensor, itemsize, &address)) || c->state[TOKENS] != token ||
        find_place(c, nbytes, &end) != position || put(c, piece, address, position, nbytes, end)) {
        Py_DECREF(slot);
        slot = NULL;
    }
    Py_XDECREF(piece);
    return slot;
}

/* take(context, tensors) -> [slot or None]: None where Python has to look at the tensor itself. */
static PyObject *take(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    (void)module;
    if (nargs != 2 || !PyList_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "take(context, list of (name, tensor))");
        return NULL;
    }
    Context *c = PyCapsule_GetPointer(args[0], CAPSULE);
    if (c == NULL) return NULL;
    Py_ssize_t n = PyList_Size(args[1]);
    PyObject *slots = PyList_New(n);
    for (Py_ssize_t i = 0; slots != NULL && i < n; i++) {
        PyObject *pair = PyList_GetItem(args[1], i), *slot = NULL;
        if (pair != NULL && PyTuple_Check(pair) && PyTuple_Size(pair) == 2) {
            Py_INCREF(pair);
            slot = take_one(c, PyTuple_GetItem(pair, 0), PyTuple_GetItem(pair, 1));
            Py_DECREF(pair);
        }
        if (slot == NULL) {
            /* The Python side tries again, with care, and says what is wrong; but an interrupt is nobody's tensor. */
            if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception)) {
                Py_DECREF(slots);
                return NULL;
            }
            PyErr_Clear();
            Py_INCREF(Py_None);
            slot = Py_None;
        }
        PyList_SetItem(slots, i, slot);
    }
    return slots;
}

#include "_fast_pack.h"
#include "_fast_roles.h"
#include "_fast_scan.h"
#include "_fast_slots.h"
#include "_fast_stacks.h"
#include "_fast_values.h"
#include "_fast_record.h"
#include "_fast_gradients.h"
#include "_fast_mode.h"

static int fits(PyObject *number) {
    int overflow;
    PyLong_AsLongLongAndOverflow(number, &overflow);
    return !overflow;
}

/* The tree of one tensor: its name and itself go to `tensors`, a new reference to {"slot": name} comes back. */
static PyObject *name_tensor(PyObject *name, PyObject *reference, PyObject *tensor, PyObject *tensors) {
    PyObject *pair = PyTuple_Pack(2, name, tensor);
    int failed = pair == NULL || PyList_Append(tensors, pair);
    Py_XDECREF(pair);
    if (failed) return NULL;
    Py_INCREF(reference);
    return reference;
}

/* flatten(values, names, references, tensor_type, tensors, walk) -> [tree]
 * `names` and `references` hold `input.i` and {"slot": "input.i"}; `walk(value, name, tensors)` does what is not plain. */
static PyObject *flatten(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    (void)module;
    if (nargs != 6 || !PyTuple_Check(args[0]) || !PyList_Check(args[1]) || !PyList_Check(args[2]) || !PyType_Check(args[3]) ||
        !PyList_Check(args[4]) || !PyCallable_Check(args[5])) {
        PyErr_SetString(PyExc_TypeError, "flatten(tuple, names, references, tensor type, list, walk)");
        return NULL;
    }
    PyObject *tensors = args[4], *walk = args[5];
    PyTypeObject *tensor_type = (PyTypeObject *)args[3];
    Py_ssize_t n = PyTuple_Size(args[0]);
    PyObject *tree = PyList_New(n);
    for (Py_ssize_t i = 0; tree != NULL && i < n; i++) {
        PyObject *value = PyTuple_GetItem(args[0], i), *entry = NULL;
        PyTypeObject *type = Py_TYPE(value);
        if (value == Py_None || type == &PyBool_Type || type == &PyUnicode_Type ||
            (type == &PyFloat_Type && isfinite(PyFloat_AsDouble(value))) || (type == &PyLong_Type && fits(value))) {
            entry = value;
            Py_INCREF(entry);
        } else {
            if (i >= PyList_Size(args[1]) || i >= PyList_Size(args[2])) {
                PyErr_SetString(PyExc_ValueError, "more values than names");
                Py_DECREF(tree);
                return NULL;
            }
            PyObject *name = PyList_GetItem(args[1], i);
            if (type == tensor_type || PyType_IsSubtype(type, tensor_type)) {
                entry = name_tensor(name, PyList_GetItem(args[2], i), value, tensors);
            } else {
                Py_INCREF(name);
                entry = PyObject_CallFunctionObjArgs(walk, value, name, tensors, NULL);
                Py_DECREF(name);
            }
        }
        if (entry == NULL) {
            Py_DECREF(tree);
            return NULL;
        }
        PyList_SetItem(tree, i, entry);
    }
    return tree;
}

/* A page of a mapped file that is cut short while it is read is no longer there, and touching it is SIGBUS, which ends the
 * process. With this handler the page is zero instead and is counted, so that whoever reads can say what happened. */
#if defined(__unix__) || defined(__APPLE__)
static struct sigaction previous_bus;
static uintptr_t page_bytes;
static long cut_pages;

static void on_bus(int number, siginfo_t *info, void *context) {
    (void)number, (void)context;
    if (info->si_code == BUS_ADRERR) {
        void *page = (void *)((uintptr_t)info->si_addr & ~(page_bytes - 1));
        if (mmap(page, page_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == page) {
            __atomic_add_fetch(&cut_pages, 1, __ATOMIC_RELAXED);
            return;
        }
    }
    sigaction(SIGBUS, &previous_bus, NULL); /* the access is tried again, and ends as it would have without us */
}

static PyObject *survive_cuts(PyObject *self, PyObject *nothing) {
    (void)self, (void)nothing;
    if (page_bytes == 0) {
        struct sigaction ours = {.sa_sigaction = on_bus, .sa_flags = SA_SIGINFO | SA_ONSTACK};
        page_bytes = (uintptr_t)sysconf(_SC_PAGESIZE);
        sigemptyset(&ours.sa_mask);
        if (sigaction(SIGBUS, &ours, &previous_bus) != 0) return PyErr_SetFromErrno(PyExc_OSError);
    }
    Py_RETURN_NONE;
}

static PyObject *count_cuts(PyObject *self, PyObject *nothing) {
    (void)self, (void)nothing;
    return PyLong_FromLong(__atomic_load_n(&cut_pages, __ATOMIC_RELAXED));
}
#endif

static PyMethodDef methods[] = {
#if defined(__unix__) || defined(__APPLE__)
    {"survive_cuts", survive_cuts, METH_NOARGS, "From now on, a page of a mapped file that was cut off is zero."},
    {"cuts", count_cuts, METH_NOARGS, "How many such pages were touched."},
#endif
    {"context", context, METH_VARARGS, "What `take` needs to know, once for each probe."},
    {"take", (PyCFunction)(void (*)(void))take, METH_FASTCALL, "Copy the plain ones of these tensors into the ring."},
    {"flatten", (PyCFunction)(void (*)(void))flatten, METH_FASTCALL, "Name the tensors among these values."},
    {"mode_type", mode_type, METH_O, "A subclass of a function mode that handles plain calls in C."},
    {"recording", make_recording, METH_VARARGS, "What recording plain calls needs to know, once for each probe."},
    {"record_backward", (PyCFunction)(void (*)(void))record_backward, METH_FASTCALL, "Record a backward whose gradients are all here."},
    {"mark", (PyCFunction)(void (*)(void))mark_roles, METH_FASTCALL, "Write the roles of tensors into their slots."},
    {"walker", make_walker, METH_O, "What `walk` needs to know, once for each probe."},
    {"walk", (PyCFunction)(void (*)(void))walk_stack, METH_FASTCALL, "The stack of a frame, as a key."},
    {"scanner", make_scanner, METH_VARARGS, "What `greatest` needs to know, once for each watch."},
    {"greatest", (PyCFunction)(void (*)(void))greatest, METH_FASTCALL, "The greatest magnitude in these tensors, if nothing is wrong with it."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_fast", "The hot loops of capture.", -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__fast(void) {
    struct {
        PyObject **place;
        const char *text;
    } names[] = {
        {&s_dtype, "dtype"}, {&s_is_cpu, "is_cpu"}, {&s_shape, "shape"}, {&s_requires_grad, "requires_grad"}, {&s_pieces, "pieces"},
        {&s_f_back, "f_back"}, {&s_f_lasti, "f_lasti"}, {&s_torch_function, "__torch_function__"}, {&s_quick, "quick"},
        {&s_plain, "is_plain"}, {&s_state, "state"}, {&s_busy, "busy"}, {&s_recording, "recording"}, {&s_before, "_before"},
        {&s_parameters, "_parameters"}, {&s_buffers, "_buffers"}, {&s_grad, "grad"}, {&s_is_leaf, "is_leaf"}, {&s_role, "role"},
        {&s_finish, "_finish"}, {&s_raised, "_raised"}, {&s_is_quick, "is_quick"}, {&s_name, "name"}, {&s_mutates, "mutates"},
        {&s_dict, "__dict__"}, {&s_recompute, "recompute"}, {&s_modules, "modules"}, {&s_calls, "calls"}, {&s_phase, "phase"},
        {&s_ordinal, "ordinal"}, {&s_outer_stack, "outer_stack"}, {&s_region, "region"}, {&s_out, "out"}, {&s_numbers, "_numbers"},
        {&s_recorded, "recorded"}, {&s_blocks, "blocks"}, {&s_queue, "_queue"}, {&s_microbatch, "microbatch"}, {&s_number, "number"},
        {&s_ids, "_ids"}, {&s_failure, "failure"}, {&s_closed, "_closed"}, {&s_out_bytes, "_out"},
        {&s_drain, "_drain"}, {&s_pipe, "_pipe"}, {&s_fd, "fd"}, {&s_last_sent, "last_sent"}, {&s_stay_warm, "_stay_warm"}, {&s_set_aside, "set_aside"}, {&s_tree, "tree"}, {&s_results, "results"}, {&s_edges, "edges"},
        {&s_follow, "follow"}, {&s_learn, "learn"}, {&s_discard, "discard"}, {&s_tool_failed, "tool_failed"}, {&s_class_name, "__name__"},
        {&s_module, "module"}, {&s_parent, "parent"}, {&s_stack, "stack"}, {&s_thread, "thread"},
        {&s_care, "care"}, {&s_states, "_states"}, {&s_optimizer, "_optimizer"}, {&s_look_outside, "_look_outside"},
        {&s_known_outside, "_known_outside"}, {&s_token, "token"}, {&s_summary, "summary"},
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if ((*names[i].place = PyUnicode_InternFromString(names[i].text)) == NULL) return NULL;
#if HAVE_X86
    __builtin_cpu_init();
    prepare_blocks(__builtin_cpu_supports("avx2") != 0, 0);
#else
    prepare_blocks(0, 0);
#endif
    return PyModule_Create(&module);
}
