/* The two loops of capture that run for every call, in C: naming the tensors among the arguments, and copying those that
 * need no care into the ring. Stable ABI. Whatever is not plain is left to the Python code beside it (flatten.py,
 * snapshot.py), which also does everything where this file is not built; tests hold the two against each other.
 *
 * The caller holds the lock of the ring. Nothing here keeps a reference to a tensor.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define ALIGNMENT 64
#define LARGE_BYTES (256 * 1024)
#define CAPSULE "tensorprobe.capture.fast"

/* Places in the array that Python and this file share. */
enum { HEAD, FREE_TO, POPULATED, TOKENS, BYTES_SEEN };

typedef struct {
    PyObject *tensor_type, *parameter_type, *dtypes, *pieces_owner, *cpu;
    char *ring;
    int64_t ring_size, largest;
    int64_t *state;
} Context;

static PyObject *s_dtype, *s_is_cpu, *s_is_contiguous, *s_is_neg, *s_is_conj, *s_const_data_ptr, *s_numel, *s_shape,
    *s_requires_grad, *s_pieces;

static void free_context(PyObject *capsule) {
    Context *c = PyCapsule_GetPointer(capsule, CAPSULE);
    if (c == NULL) return;
    Py_XDECREF(c->tensor_type);
    Py_XDECREF(c->parameter_type);
    Py_XDECREF(c->dtypes);
    Py_XDECREF(c->pieces_owner);
    Py_XDECREF(c->cpu);
    PyMem_Free(c);
}

/* context(tensor_type, parameter_type, dtypes, pieces_owner, ring_address, ring_size, state_address, largest) */
static PyObject *context(PyObject *self, PyObject *args) {
    PyObject *tensor, *parameter, *dtypes, *owner;
    unsigned long long ring, state;
    long long size, largest;
    if (!PyArg_ParseTuple(args, "OOO!OKLKL", &tensor, &parameter, &PyDict_Type, &dtypes, &owner, &ring, &size, &state, &largest))
        return NULL;
    if (size <= 0 || size % ALIGNMENT || largest < 0 || largest > size || !ring || !state) {
        PyErr_SetString(PyExc_ValueError, "a ring needs an address, a size that is a multiple of 64, and room for the largest piece");
        return NULL;
    }
    Context *c = PyMem_Calloc(1, sizeof *c);
    if (c == NULL) return PyErr_NoMemory();
    Py_INCREF(tensor);
    Py_INCREF(parameter);
    Py_INCREF(dtypes);
    Py_INCREF(owner);
    c->tensor_type = tensor;
    c->parameter_type = parameter;
    c->dtypes = dtypes;
    c->pieces_owner = owner;
    c->cpu = PyUnicode_InternFromString("cpu");
    c->ring = (char *)(uintptr_t)ring;
    c->ring_size = size;
    c->largest = largest;
    c->state = (int64_t *)(uintptr_t)state;
    PyObject *capsule = PyCapsule_New(c, CAPSULE, free_context);
    if (capsule == NULL) PyMem_Free(c);
    return capsule;
}

/* 1 when the attribute is True, 0 when it is anything else, -1 on error. */
static int is_true(PyObject *object, PyObject *name) {
    PyObject *value = PyObject_GetAttr(object, name);
    if (value == NULL) return -1;
    Py_DECREF(value);
    return value == Py_True;
}

static int answers_true(PyObject *object, PyObject *name) {
    PyObject *value = PyObject_CallMethodObjArgs(object, name, NULL);
    if (value == NULL) return -1;
    Py_DECREF(value);
    return value == Py_True;
}

static int ask_number(PyObject *object, PyObject *name, unsigned long long *number) {
    PyObject *value = PyObject_CallMethodObjArgs(object, name, NULL);
    if (value == NULL) return -1;
    *number = PyLong_AsUnsignedLongLong(value);
    Py_DECREF(value);
    return PyErr_Occurred() ? -1 : 0;
}

/* Where `nbytes` would stand in the ring now; -1 when Python must wait, populate or cut into pieces first. */
static int64_t find_place(const Context *c, int64_t nbytes, int64_t *end) {
    if (nbytes > c->largest) return -1;
    int64_t room = (nbytes + ALIGNMENT - 1) & -(int64_t)ALIGNMENT;
    int64_t position = c->state[HEAD], place = position % c->ring_size;
    if (place + room > c->ring_size) position += c->ring_size - place;
    *end = position + room;
    return *end > c->state[FREE_TO] || *end > c->state[POPULATED] ? -1 : position;
}

static int note_piece(PyObject *pieces, int64_t position, int64_t nbytes, PyObject *code) {
    PyObject *piece = Py_BuildValue("(LLOO)", (long long)position, (long long)nbytes, code, Py_True);
    if (piece == NULL) return -1;
    int failed = PyList_Append(pieces, piece);
    Py_DECREF(piece);
    return failed;
}

static PyObject *make_slot(const Context *c, PyObject *name, PyObject *dtype, PyObject *shape, PyObject *grad, int64_t token) {
    PyObject *slot = PyList_New(8), *number = PyLong_FromLongLong(token);
    if (slot == NULL || number == NULL) {
        Py_XDECREF(slot);
        Py_XDECREF(number);
        return NULL;
    }
    PyObject *fields[8] = {name, dtype, shape, c->cpu, Py_None, grad, number, Py_None};
    for (int i = 0; i < 8; i++) {
        if (i != 6) Py_INCREF(fields[i]);
        PyList_SetItem(slot, i, fields[i]);
    }
    return slot;
}

/* The slot of one tensor, copied; NULL without an error when it needs care, NULL with one when something failed. */
static PyObject *take_one(const Context *c, PyObject *pieces, PyObject *name, PyObject *tensor) {
    PyObject *type = (PyObject *)Py_TYPE(tensor);
    if (type != c->tensor_type && type != c->parameter_type) return NULL;
    PyObject *dtype = PyObject_GetAttr(tensor, s_dtype);
    if (dtype == NULL) return NULL;
    PyObject *known = PyDict_GetItemWithError(c->dtypes, dtype);
    Py_DECREF(dtype);
    if (known == NULL || is_true(tensor, s_is_cpu) != 1 || answers_true(tensor, s_is_contiguous) != 1) return NULL;
    if (answers_true(tensor, s_is_neg) || answers_true(tensor, s_is_conj)) return NULL;
    unsigned long long address, count;
    if (ask_number(tensor, s_const_data_ptr, &address) || ask_number(tensor, s_numel, &count)) return NULL;
    long long itemsize = PyLong_AsLongLong(PyTuple_GetItem(known, 2));
    int64_t nbytes = (int64_t)count * itemsize, end;
    if (!address && nbytes) return NULL;
    int64_t position = find_place(c, nbytes, &end);
    if (position < 0) return NULL;
    PyObject *shape = PyObject_GetAttr(tensor, s_shape), *grad = PyObject_GetAttr(tensor, s_requires_grad);
    PyObject *slot = NULL;
    if (shape != NULL && grad != NULL) slot = make_slot(c, name, PyTuple_GetItem(known, 0), shape, grad, c->state[TOKENS]);
    Py_XDECREF(shape);
    Py_XDECREF(grad);
    if (slot == NULL) return NULL;
    char *to = c->ring + position % c->ring_size;
    const char *from = (const char *)(uintptr_t)address;
    if (nbytes >= LARGE_BYTES) {
        Py_BEGIN_ALLOW_THREADS
        memcpy(to, from, (size_t)nbytes);
        Py_END_ALLOW_THREADS
    } else if (nbytes) {
        memcpy(to, from, (size_t)nbytes);
    }
    if (note_piece(pieces, position, nbytes, PyTuple_GetItem(known, 1))) {
        Py_DECREF(slot);
        return NULL;
    }
    c->state[HEAD] = end;
    c->state[TOKENS] += 1;
    c->state[BYTES_SEEN] += nbytes;
    return slot;
}

/* take(context, tensors) -> [slot or None]: None where Python has to look at the tensor itself. */
static PyObject *take(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 2 || !PyList_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "take(context, list of (name, tensor))");
        return NULL;
    }
    Context *c = PyCapsule_GetPointer(args[0], CAPSULE);
    if (c == NULL) return NULL;
    PyObject *pieces = PyObject_GetAttr(c->pieces_owner, s_pieces);
    if (pieces == NULL) return NULL;
    Py_ssize_t n = PyList_Size(args[1]);
    PyObject *slots = PyList_New(n);
    for (Py_ssize_t i = 0; slots != NULL && i < n; i++) {
        PyObject *pair = PyList_GetItem(args[1], i);
        PyObject *slot = NULL;
        if (PyTuple_Check(pair) && PyTuple_Size(pair) == 2)
            slot = take_one(c, pieces, PyTuple_GetItem(pair, 0), PyTuple_GetItem(pair, 1));
        if (slot == NULL) {
            PyErr_Clear(); /* the Python side tries again, with care, and says what is wrong */
            Py_INCREF(Py_None);
            slot = Py_None;
        }
        PyList_SetItem(slots, i, slot);
    }
    Py_DECREF(pieces);
    return slots;
}

static int fits(PyObject *number) {
    int overflow;
    PyLong_AsLongLongAndOverflow(number, &overflow);
    return !overflow;
}

/* flatten(values, names, references, tensor_type, tensors, walk) -> [tree]
 * `names` and `references` hold `input.i` and {"slot": "input.i"}; `walk(value, name, tensors)` does what is not plain. */
static PyObject *flatten(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 6 || !PyTuple_Check(args[0]) || !PyList_Check(args[1]) || !PyList_Check(args[2]) || !PyType_Check(args[3]) ||
        !PyList_Check(args[4])) {
        PyErr_SetString(PyExc_TypeError, "flatten(tuple, names, references, tensor type, list, walk)");
        return NULL;
    }
    PyObject *names = args[1], *references = args[2], *tensors = args[4], *walk = args[5];
    Py_ssize_t n = PyTuple_Size(args[0]);
    if (n > PyList_Size(names) || n > PyList_Size(references)) {
        PyErr_SetString(PyExc_ValueError, "more values than names");
        return NULL;
    }
    PyObject *tree = PyList_New(n);
    for (Py_ssize_t i = 0; tree != NULL && i < n; i++) {
        PyObject *value = PyTuple_GetItem(args[0], i), *entry = NULL;
        PyTypeObject *type = Py_TYPE(value);
        if (type == (PyTypeObject *)args[3] || PyType_IsSubtype(type, (PyTypeObject *)args[3])) {
            PyObject *pair = PyTuple_Pack(2, PyList_GetItem(names, i), value);
            if (pair != NULL && PyList_Append(tensors, pair) == 0) {
                entry = PyList_GetItem(references, i);
                Py_INCREF(entry);
            }
            Py_XDECREF(pair);
        } else if (value == Py_None || type == &PyBool_Type || type == &PyUnicode_Type ||
                   (type == &PyFloat_Type && isfinite(PyFloat_AsDouble(value)))) {
            entry = value;
            Py_INCREF(entry);
        } else if (type == &PyLong_Type && fits(value)) {
            entry = value;
            Py_INCREF(entry);
        } else {
            entry = PyObject_CallFunctionObjArgs(walk, value, PyList_GetItem(names, i), tensors, NULL);
        }
        if (entry == NULL) {
            Py_DECREF(tree);
            return NULL;
        }
        PyList_SetItem(tree, i, entry);
    }
    return tree;
}

static PyMethodDef methods[] = {
    {"context", context, METH_VARARGS, "What `take` needs to know, once for each probe."},
    {"take", (PyCFunction)(void (*)(void))take, METH_FASTCALL, "Copy the plain ones of these tensors into the ring."},
    {"flatten", (PyCFunction)(void (*)(void))flatten, METH_FASTCALL, "Name the tensors among these values."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_fast", "The hot loops of capture.", -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__fast(void) {
    struct {
        PyObject **place;
        const char *text;
    } names[] = {
        {&s_dtype, "dtype"}, {&s_is_cpu, "is_cpu"}, {&s_is_contiguous, "is_contiguous"}, {&s_is_neg, "is_neg"},
        {&s_is_conj, "is_conj"}, {&s_const_data_ptr, "const_data_ptr"}, {&s_numel, "numel"}, {&s_shape, "shape"},
        {&s_requires_grad, "requires_grad"}, {&s_pieces, "pieces"},
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if ((*names[i].place = PyUnicode_InternFromString(names[i].text)) == NULL) return NULL;
    return PyModule_Create(&module);
}
